"""The backend for ssh without any host: its checks, its commands, and why an ssh ended.

Launches over a real sshd are in tests/multinode/test_ssh.py.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path

import pytest

from mpctl.core.errors import Issue
from mpctl.plan.planning.plan import Plan, load_plan
from mpctl.run.clusters.ssh.backend import (
    SshBackend,
    SshStarter,
    choose_hosts,
    device_environment,
    passed_environment,
    ssh_command,
)
from mpctl.run.clusters.ssh.hostfile import SshHost
from mpctl.run.launch.control.cluster import AgentOrder
from mpctl.spec.launch import SshSpec
from tests.cli.calls import Mpctl, caller
from tests.run.launch.command import wait_for


def test_the_command_of_a_host() -> None:
    host = SshHost("n1", user="ann", port=2222)
    command = ssh_command(SshSpec(config="/c", connect_timeout=7), host, ["python", "-m", "x"])
    assert shlex.join(command) == (
        "ssh -T -F /c -o BatchMode=yes -o ConnectTimeout=7 -o ServerAliveInterval=5 "
        "-o ServerAliveCountMax=3 -o LogLevel=INFO -o ControlMaster=no "
        "-o ClearAllForwardings=yes -o RemoteCommand=none -p 2222 -- ann@n1 'exec python -m x'"
    )
    assert "-F" not in ssh_command(SshSpec(), SshHost("n1"), ["x"])


def test_the_remote_shell_gets_every_argument_as_it_is() -> None:
    """ssh joins its arguments with spaces, and a shell on the other side splits them again."""
    program = ["py thon", "a'b", "$HOME;`id`", "", "ümlaut", "a\nb"]
    last = ssh_command(SshSpec(), SshHost("n1"), program)[-1]
    assert shlex.split(last) == ["exec", *program]


def test_variables_of_torch_and_its_libraries_travel_and_secrets_do_not() -> None:
    environment = {
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "eth1",
        "OMP_NUM_THREADS": "4",
        "PYTHONPATH": "/shared",
        "TORCH_LOGS": "all",
        "HF_TOKEN": "secret",
        "HOME": "/root",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "CUDA_VISIBLE_DEVICES": "0",
        "MINE": "1",
    }
    passed = passed_environment(environment, ["MINE", "ABSENT"])
    assert list(passed) == ["GLOO_SOCKET_IFNAME", "MINE", "NCCL_DEBUG", "OMP_NUM_THREADS", "PYTHONPATH", "TORCH_LOGS"]


def test_chosen_slots_become_the_visible_devices() -> None:
    assert device_environment(SshHost("n1", (0, 2))) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    assert device_environment(SshHost("n1", (0, 1))) == {}
    assert device_environment(SshHost("n1")) == {}


ORDER = AgentOrder(Path("/runs/a run"), Path("/runs/a run/nodes/key-1"), 4321, 300)
TWO_BY_TWO = {"cluster.nodes": 2, "cluster.gpus_per_node": 2, "parallel.tp": 2}


@pytest.fixture
def mpctl(capsys: pytest.CaptureFixture[str]) -> Mpctl:
    return caller(capsys)


def plan_for(hostfile: Path | None, **ssh: str) -> Plan:
    settings = {f"launch.ssh.{key}": value for key, value in ssh.items()}
    if hostfile is not None:
        settings["launch.ssh.hostfile"] = str(hostfile)
    return load_plan("demo", {**TWO_BY_TWO, **settings})


def hostfile(folder: Path, *lines: str) -> Path:
    path = folder / "hosts"
    path.write_text("\n".join(lines) + "\n")
    return path


def issues(plan: Plan) -> list[str]:
    return [str(issue) for issue in SshBackend(plan.job, os.environ).check(plan)]


# ---------------------------------------------------------------- checks without a host


def test_a_hostfile_is_required() -> None:
    (issue,) = choose_hosts(plan_for(None).job).issues
    assert str(issue) == (
        "--hostfile: is required by --on ssh (add --hostfile FILE with a line such as `n1 slots=8` for each host)"
    )


def test_issues_of_the_file_and_of_the_filter_are_reported_together(tmp_path: Path) -> None:
    plan = plan_for(hostfile(tmp_path, "n1 slots=2", "n1 slots=2", "n2 slot=2"), include="n1@n7")
    text = "\n".join(issues(plan))
    assert "hosts:2: n1 is already in line 1" in text
    assert "hosts:3: 'slot=2' is not known" in text
    assert "launch.ssh.include: 'n7' is not in the hostfile" in text


def test_too_few_hosts_and_wrong_slots(tmp_path: Path) -> None:
    (few,) = issues(plan_for(hostfile(tmp_path, "n1 slots=2")))
    assert "1 host, but the plan has 2 nodes" in few
    (slots,) = issues(plan_for(hostfile(tmp_path, "n1 slots=2", "n2 slots=8")))
    assert "n2 has 8 slots, but the plan puts 2 ranks on each node" in slots
    chosen = choose_hosts(plan_for(hostfile(tmp_path, "n1 slots=2", "n2 slots=8"), include="n1@n2:5,7").job)
    assert [host.slots for host in chosen.hosts] == [(0, 1), (5, 7)]


def test_a_host_without_an_ssh_client_is_refused(tmp_path: Path) -> None:
    plan = plan_for(hostfile(tmp_path, "n1 slots=2", "n2"))
    (issue,) = SshBackend(plan.job, {"PATH": str(tmp_path)}).check(plan)
    assert issue.rule == "no-ssh"


# ---------------------------------------------------------------- commands


def test_the_agent_of_a_host_gets_run_key_node_and_ways_to_the_launcher() -> None:
    hosts = [SshHost("n1", (0, 1)), SshHost("n2", (5, 7))]
    environment = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "secret"}
    agents = SshStarter(SshSpec(python="/py"), hosts, ORDER, environment, ["10.0.0.5", "fd00::5"])
    assert agents.command(1)[-1] == (
        "exec env NCCL_DEBUG=INFO CUDA_VISIBLE_DEVICES=5,7 PYTHONSAFEPATH=1 /py "
        "-m mpctl.run.launch.node.agent '/runs/a run' --connect=@ssh,10.0.0.5,fd00::5:4321 "
        "--seconds=300 "
        "'--key=/runs/a run/nodes/key-1' --node=1"
    )


def test_interpreter_and_address_are_those_of_this_host_unless_set() -> None:
    agents = SshStarter(SshSpec(address="10.9.9.9"), [SshHost("n1")], ORDER, {})
    assert f"{sys.executable} -m mpctl" in agents.command(0)[-1]
    assert "--connect=10.9.9.9:4321" in agents.command(0)[-1]


def test_dry_run_prints_the_ssh_command_of_each_host(mpctl: Mpctl, tmp_path: Path) -> None:
    file = hostfile(tmp_path, "n2 slots=2", "ann@n1 slots=2", "n3 slots=2")
    said = mpctl(
        "launch",
        "demo",
        "--nodes",
        "2",
        "--gpus-per-node",
        "2",
        "--tp",
        "2",
        "--hostfile",
        file,
        "--exclude",
        "n3",
        "--run-dir",
        tmp_path / "run",
        "--dry-run",
        "--json",
    )
    assert said.code == 0, said.err
    hosts = said.document["hosts"]
    assert [(host["node"], host["host"]) for host in hosts] == [(0, "n2"), (1, "n1")]
    assert hosts[1]["command"][:2] == ["ssh", "-T"]
    assert hosts[1]["command"][-2] == "ann@n1"
    assert said.document["job"]["launch"]["on"] == "ssh"
    assert said.document["job"]["launch"]["ssh"]["hostfile"] == str(file)
    assert not (tmp_path / "run").exists()


def test_a_bad_hostfile_ends_with_code_2_and_every_line(mpctl: Mpctl, tmp_path: Path) -> None:
    file = hostfile(tmp_path, "n1 slots=x", "-oProxyCommand=x slots=2")
    said = mpctl(
        "launch",
        "demo",
        "--nodes",
        "2",
        "--gpus-per-node",
        "2",
        "--tp",
        "2",
        "--hostfile",
        file,
        "--run-dir",
        tmp_path / "run",
        "--json",
    )
    assert said.code == 2
    assert set(said.issues) == {"hostfile-slots", "hostfile-host"}


# ---------------------------------------------------------------- how an ssh ends

FAKE_SSH = """#!{python}
import json, os, signal, sys
script = json.loads({script!r})[sys.argv[-2]]
sys.stderr.write(script["says"])
sys.stderr.flush()
if script["code"] is None:
    signal.pause()
sys.exit(script["code"])
"""


def starter(folder: Path, **script: dict[str, object]) -> SshStarter:
    """A starter whose ssh runs the part of `script` for the host, and exits with its code."""
    fake = folder / "ssh"
    fake.write_text(FAKE_SSH.format(python=sys.executable, script=json.dumps(script)))
    fake.chmod(0o755)
    hosts = [SshHost(name) for name in script]
    order = AgentOrder(folder, folder / "key", 4321, 300)
    return SshStarter(SshSpec(), hosts, order, {"PATH": str(folder)})


def test_all_hosts_are_contacted_at_once_and_each_failure_is_named(tmp_path: Path) -> None:
    refused = "ssh: connect to host n1 port 22: Connection refused\n"
    ssh = starter(
        tmp_path,
        n1={"says": refused, "code": 255},
        n2={"says": "", "code": None},
        n3={"says": "bash: line 1: /py: No such file or directory", "code": 127},
    )
    ssh.start([0, 1, 2])
    try:
        wait_for(lambda: len(ssh.failures()) == 2, 20)
        failures = ssh.failures()
        assert {node: issue.rule for node, issue in failures.items()} == {0: "ssh-refused", 2: "remote-no-python"}
        assert isinstance(failures[0], Issue)
        assert [failures[0].where, failures[2].where] == ["n1", "n3"]
        assert (tmp_path / "ssh-0.log").read_text() == refused
        ssh.start([0])  # again, as after a lost host: the old words do not count
        wait_for(lambda: 0 in ssh.failures(), 20)
        assert (tmp_path / "ssh-0.log").read_text() == refused
    finally:
        for client in ssh.clients.values():
            client.kill()


def test_a_log_that_was_removed_is_no_failure_of_its_own(tmp_path: Path) -> None:
    """As by somebody who removes RUN/nodes while the run trains."""
    ssh = starter(tmp_path, n1={"says": "words", "code": 3})
    ssh.start([0])
    (tmp_path / "ssh-0.log").unlink()
    wait_for(lambda: 0 in ssh.failures(), 20)
    assert "ssh-0.log cannot be read: No such file or directory" in ssh.failures()[0].message
    assert "3" in ssh.failures()[0].message


def test_an_ssh_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpctl.run.clusters.ssh.backend.END_SECONDS", 0.1)
    ssh = starter(tmp_path, n1={"says": "", "code": None})
    ssh.start([0])
    started = time.monotonic()
    ssh.end()
    assert time.monotonic() - started < 20
    assert ssh.clients[0].returncode is not None
