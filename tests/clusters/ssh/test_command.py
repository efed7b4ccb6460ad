"""The ssh command as a list of arguments, and the variables that travel with it."""

from __future__ import annotations

import shlex

from mpctl.clusters.ssh.command import (
    device_environment,
    passed_environment,
    remote_command,
    ssh_command,
)
from mpctl.clusters.ssh.host_line import SshHost
from mpctl.spec.launch import SshSpec


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


def test_variables_are_set_on_the_remote_side_by_env() -> None:
    assert remote_command(["python"], {"A": "b c"}) == ["env", "A=b c", "python"]


def test_variables_of_torch_and_its_libraries_travel_and_secrets_do_not() -> None:
    environment = {
        "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth1", "OMP_NUM_THREADS": "4",
        "PYTHONPATH": "/shared", "TORCH_LOGS": "all", "HF_TOKEN": "secret", "HOME": "/root",
        "AWS_SECRET_ACCESS_KEY": "secret", "CUDA_VISIBLE_DEVICES": "0", "MINE": "1",
    }  # fmt: skip
    passed = passed_environment(environment, ["MINE", "ABSENT"])
    assert list(passed) == [
        "GLOO_SOCKET_IFNAME", "MINE", "NCCL_DEBUG", "OMP_NUM_THREADS", "PYTHONPATH", "TORCH_LOGS",
    ]  # fmt: skip


def test_chosen_slots_become_the_visible_devices() -> None:
    assert device_environment(SshHost("n1", (0, 2))) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    assert device_environment(SshHost("n1", (0, 1))) == {}
    assert device_environment(SshHost("n1")) == {}
