"""What a real ssh client says of hosts that cannot be used (run/clusters/ssh/failures.py)."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from mpctl.core.errors import Issue
from mpctl.run.clusters.ssh.backend import ssh_command
from mpctl.run.clusters.ssh.failures import ssh_issue
from mpctl.run.clusters.ssh.hostfile import SshHost
from mpctl.spec.launch import SshSpec
from tests.multinode.daemons import free_ports
from tests.multinode.ssh_hosts import SshHosts, path_of

pytestmark = pytest.mark.cluster("ssh")
NOTHING = [sys.executable, "-c", "pass"]


class Ending(NamedTuple):
    code: int
    output: str
    issue: Issue


def ending(hosts: SshHosts, name: str, *remote: str, timeout: int = 10) -> Ending:
    """How the ssh to a host ends, with the command that a launch would use."""
    ssh, host = SshSpec(config=str(hosts.config), connect_timeout=timeout), SshHost(name)
    command = ssh_command(ssh, host, remote or NOTHING)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    python, code = (remote or NOTHING)[0], done.returncode
    issue = ssh_issue(host, code, done.stderr, python=python, seconds=timeout)
    return Ending(code, done.stderr, issue)


def test_the_two_hosts_of_these_tests_can_be_used(ssh_hosts: SshHosts) -> None:
    assert [ending(ssh_hosts, name).code for name in ("n1", "n2")] == [0, 0]


def test_every_refusal_has_its_own_words(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    host = ssh_hosts.hosts["n1"]
    here = {"HostName": host.address, "Port": host.port}
    (tmp_path / "empty").touch()
    changed = (ssh_hosts.folder / "other_key.pub").read_text().split()[1]
    (tmp_path / "changed").write_text(f"[{host.address}]:{host.port} ssh-ed25519 {changed}\n")
    for name, settings in {
        "refused": {"HostName": "127.0.0.1", "Port": free_ports(1)[0]},
        "unknown": {**here, "UserKnownHostsFile": tmp_path / "empty"},
        "changed": {**here, "UserKnownHostsFile": tmp_path / "changed"},
        "stranger": {**here, "User": "no-such-user"},
        "nokey": {**here, "IdentityFile": tmp_path / "none", "PubkeyAuthentication": "no"},
        "nameless": {"HostName": "no-such-host.invalid"},
        "jump": {**here, "ProxyJump": "refused"},
        "proxy": {**here, "ProxyCommand": "/no/such/proxy"},
    }.items():
        ssh_hosts.add_alias(name, **settings)
    rules = {
        name: ending(ssh_hosts, name).issue.rule
        for name in ("refused", "unknown", "changed", "stranger", "nokey", "nameless", "jump", "proxy")
    }
    assert rules == {
        "refused": "ssh-refused",
        "unknown": "ssh-unknown-host-key",
        "changed": "ssh-changed-host-key",
        "stranger": "ssh-no-permission",
        "nokey": "ssh-no-permission",
        "nameless": "ssh-unknown-name",
        "jump": "ssh-refused",
        "proxy": "ssh-not-served",
    }
    issue = ending(ssh_hosts, "changed").issue
    assert f"{tmp_path}/changed:1" in issue.message


def test_a_key_that_others_may_read_is_named(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text((ssh_hosts.folder / "user_key").read_text())
    key.chmod(0o644)
    text = ssh_hosts.config.read_text().replace(str(ssh_hosts.folder / "user_key"), str(key))
    ssh_hosts.config.write_text(text)
    issue = ending(ssh_hosts, "n1").issue
    assert (issue.rule, issue.hint) == ("ssh-no-permission", f"protect it: chmod 600 {key}")


def test_a_host_that_says_nothing_or_is_no_sshd(ssh_hosts: SshHosts) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ssh_hosts.add_alias("silent", HostName="127.0.0.1", Port=silent.getsockname()[1])
        issue = ending(ssh_hosts, "silent", timeout=1).issue
        assert (issue.rule, issue.where) == ("ssh-timed-out", "silent")
        assert "did not answer in 1 s" in issue.message
    port = free_ports(1)[0]
    with subprocess.Popen(
        [sys.executable, "-m", "http.server", "-b", "127.0.0.1", str(port)],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    ) as web:
        try:
            ssh_hosts.add_alias("web", HostName="127.0.0.1", Port=port)
            rules = {ending(ssh_hosts, "web", timeout=2).issue.rule for _ in range(2)}
        finally:
            web.kill()
    assert rules <= {"ssh-not-served", "ssh-timed-out", "ssh-refused"}  # refused: still starting


def test_a_client_that_refuses_its_configuration(ssh_hosts: SshHosts) -> None:
    text = ssh_hosts.config.read_text()
    ssh_hosts.config.write_text("Blah yes\n" + text)
    assert ending(ssh_hosts, "n1").issue.rule == "ssh-config"
    ssh_hosts.config.unlink()
    assert ending(ssh_hosts, "n1").issue.rule == "ssh-config"


def test_what_is_missing_on_the_remote_side(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    python = str(tmp_path / "python3.99")
    absent = ending(ssh_hosts, "n1", python, "-m", "mpctl").issue
    assert absent.rule == "remote-no-python"
    assert f"{python}: No such file" in absent.message
    folder = ending(ssh_hosts, "n1", str(tmp_path), "-m", "mpctl").issue
    assert folder.rule == "remote-no-python"
    bare = ending(ssh_hosts, "n1", sys.executable, "-S", "-I", "-m", "mpctl.run.launch").issue
    assert bare.rule == "remote-no-module"
    assert "has no module mpctl" in bare.message
    failed = ending(ssh_hosts, "n1", sys.executable, "-c", "raise SystemExit('no room')").issue
    assert failed.message == "the node agent ended with code 1: no room"


def test_arguments_arrive_as_they_are(ssh_hosts: SshHosts) -> None:
    words = ["a b", "$HOME", "`id`", "'", '"', "", "a;b", "*", "ü"]
    script = "import sys; sys.exit(repr(sys.argv[1:]))"
    said = ending(ssh_hosts, "n1", sys.executable, "-X", "utf8", "-c", script, *words)
    assert said.output.strip() == repr(words)


def test_a_connection_that_dies_is_told_from_one_that_was_refused(ssh_hosts: SshHosts) -> None:
    kill = "import os, psutil; psutil.Process(os.getppid()).kill(); import time; time.sleep(5)"
    issue = ending(ssh_hosts, "n1", sys.executable, "-c", kill).issue
    assert (issue.rule, issue.where) == ("ssh-lost", "n1")


@pytest.mark.cluster("netns")
def test_a_host_without_a_way_to_it_is_unreachable(namespaces: SshHosts) -> None:
    namespaces.cut("n2")
    issue = ending(namespaces, "n2", timeout=2).issue
    assert (issue.rule, issue.where) == ("ssh-timed-out", "n2")
    namespaces.add_alias("far", HostName="192.0.2.77")
    inside = [path_of("ip"), "netns", "exec", namespaces.hosts["n1"].namespace]
    command = ssh_command(SshSpec(config=str(namespaces.config)), SshHost("far"), NOTHING)
    done = subprocess.run([*inside, *command], capture_output=True, text=True, check=False)
    far = ssh_issue(SshHost("far"), done.returncode, done.stderr, python="python", seconds=10)
    assert far.rule == "ssh-unreachable"
    assert "Network is unreachable" in far.message
