"""The ssh command that runs a program on a host, as an argument list; no shell on this side.

The system's ssh client is used, so that a user's ~/.ssh/config, keys, agent and jump hosts work.
Options that mpctl sets win over the user's config, because ssh takes the first value it reads:

    BatchMode=yes              never ask for a password or about a host key: fail, with a message
    ConnectTimeout=N           launch.ssh.connect_timeout
    ServerAliveInterval=5, ServerAliveCountMax=3
                               a host that has not answered for 15 s ends the ssh
    LogLevel=INFO              messages that failures.py tells apart, also under a config's QUIET
    ControlMaster=no           never become a shared connection, which would outlive the launch;
                               one that the user has opened is used
    ClearAllForwardings=yes    the config's port forwardings are meant for one session, not for two
    RemoteCommand=none, -T     the command below and no terminal, whatever the config says

ssh joins its arguments with spaces, and the remote user's login shell splits them again. The remote
command is therefore quoted as one word (shlex.join) that begins with exec: the shell is replaced by
the program, and a signal to one reaches the other.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence

from mpctl.clusters.ssh.host_line import SshHost
from mpctl.spec.launch import SshSpec

ALIVE_SECONDS, ALIVE_COUNT = 5, 3
CLIENT_ENVIRONMENT = {"LC_ALL": "C.UTF-8"}
"""Environment variables of the ssh client: its messages in English, which failures.py reads."""

PASSED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "KMP_", "UCX_", "FI_",
                   "TRITON_", "MPCTL_")  # fmt: skip
PASSED_NAMES = (
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
)
"""Variables of the launcher's environment that travel to every host: those that tune torch, NCCL,
gloo and OpenMP, and where Python finds modules. Others, such as tokens and passwords, do not, since
a command line can be read by every user of a host; `launch.ssh.pass_env` names more."""


def ssh_command(ssh: SshSpec, host: SshHost, remote: Sequence[str]) -> list[str]:
    """The command that runs the program `remote` on a host."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(ssh.connect_timeout),
        "ServerAliveInterval": str(ALIVE_SECONDS),
        "ServerAliveCountMax": str(ALIVE_COUNT),
        "LogLevel": "INFO",
        "ControlMaster": "no",
        "ClearAllForwardings": "yes",
        "RemoteCommand": "none",
    }
    command = ["ssh", "-T"]
    if ssh.config is not None:
        command += ["-F", ssh.config]
    for name, value in options.items():
        command += ["-o", f"{name}={value}"]
    if host.port is not None:
        command += ["-p", str(host.port)]
    return [*command, "--", host.destination, f"exec {shlex.join(remote)}"]


def config_command(ssh: SshSpec, host: SshHost) -> list[str]:
    """The command that prints what the user's config says of a host, without contacting it."""
    file = [] if ssh.config is None else ["-F", ssh.config]
    port = [] if host.port is None else ["-p", str(host.port)]
    return ["ssh", "-G", *file, *port, "--", host.destination]


def direct_name(config: str) -> str | None:
    """The name or address that ssh connects to by the output of `config_command`; None where it
    goes by another host or a command."""
    pairs = (line.partition(" ") for line in config.splitlines())
    settings = {key: value for key, _, value in pairs}
    proxies = (settings.get(key, "none") for key in ("proxyjump", "proxycommand"))
    return None if any(proxy != "none" for proxy in proxies) else settings.get("hostname")


def remote_command(program: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """A program with variables added to its environment: `env NAME=VALUE ... PROGRAM`."""
    return ["env", *(f"{name}={value}" for name, value in environment.items()), *program]


def passed_environment(environment: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """The variables of the launcher that travel to every host, by name. more: names of others."""
    names = {*PASSED_NAMES, *more}
    return {
        name: value
        for name, value in sorted(environment.items())
        if name in names or name.startswith(PASSED_PREFIXES)
    }


def device_environment(host: SshHost) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES where a hostfile or a filter chose slots of a host."""
    if host.slots is None or host.slots == tuple(range(len(host.slots))):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.slots))}
