"""`--on ssh`: a node agent on each host of a hostfile, started by the system's ssh client.

All hosts are contacted at once. What ssh and an agent say goes to RUN/nodes/ssh-N.log; an ssh that
ends before its agent has connected says in it why the host cannot be used (failures.py).

An ssh is only how an agent starts. The agent lives as long as its connection to the launcher's
control server: when the launcher ends or is killed, or the network is cut, it ends its ranks and
itself, and with it the ssh. An ssh client that is killed does no harm: the agent goes on until the
launcher says that the launch is over. For the same reason no terminal is asked for (ssh -T), and
each ssh leads a session of its own, so that Ctrl-C or a closed terminal reaches the launcher alone.

The user's ~/.ssh/config, keys, agent and jump hosts work. Options that mpctl sets win over them,
because ssh takes the first value it reads:

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
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from mpctl.clusters.backend import OnEvent
from mpctl.clusters.ssh.failures import ssh_issue
from mpctl.clusters.ssh.hostfile import (
    HostList,
    SshHost,
    first_slots,
    hosts_of_plan,
    read_hostfile,
    select_hosts,
)
from mpctl.errors import Issue
from mpctl.hosts.network import addresses_towards, every_address, own_addresses
from mpctl.launch.control.cluster import AgentCluster, AgentOrder, agent_cluster
from mpctl.launch.launch_plan import HostCommand, LaunchPlan
from mpctl.planning.plan import Plan
from mpctl.rundir.directory import RunDir
from mpctl.spec.job import JobSpec
from mpctl.spec.launch import SshSpec

END_SECONDS, KILL_SECONDS, POLL_SECONDS = 4.0, 1.0, 0.02
"""How long an ssh may take to end after its agent was told that the launch is over, and after it
was asked by SIGTERM. An agent ends without its ssh, too."""

CONFIG_THREADS, CONFIG_SECONDS = 16, 10.0
"""How many hosts ssh is asked about at once, without contacting them, and for how long."""

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


def choose_hosts(job: JobSpec) -> HostList:
    """The hosts of a job, in the order of the plan's nodes, with everything that is wrong."""
    ssh, cluster = job.launch.ssh, job.cluster
    if ssh.hostfile is None:
        hint = "add --hostfile FILE with a line such as `n1 slots=8` for each host"
        return HostList((), (Issue("hostfile", "--hostfile", "is required by --on ssh", hint),))
    hostfile = read_hostfile(Path(ssh.hostfile))
    chosen = select_hosts(hostfile.hosts, ssh.include, ssh.exclude)
    issues = [*hostfile.issues, *chosen.issues]
    if issues:
        return HostList(chosen.hosts, tuple(issues))
    ranks = cluster.gpus_per_node or 1
    return hosts_of_plan(chosen.hosts, cluster.nodes, ranks, ssh.hostfile)


def use_first_slots(job: JobSpec) -> JobSpec:
    """The job with an include of as many slots of its hosts as a node has ranks, where the hostfile
    has more and neither include nor exclude chooses among them."""
    ssh, ranks = job.launch.ssh, job.cluster.gpus_per_node or 1
    if ssh.hostfile is None or ssh.include is not None or ssh.exclude is not None:
        return job
    hosts = read_hostfile(Path(ssh.hostfile)).hosts[: job.cluster.nodes]
    include = first_slots(hosts, ranks)
    if include is None:
        return job
    chosen = job.launch.model_copy(update={"ssh": ssh.model_copy(update={"include": include})})
    return job.model_copy(update={"launch": chosen})


@dataclass(frozen=True)
class SshAgents:
    """How the node agent of each host is started; a pure function of what is given.

    environment: of the launcher; addresses: of the launcher's host, for hosts that reach it at
    another address than the one ssh came from.
    """

    ssh: SshSpec
    hosts: Sequence[SshHost]
    order: AgentOrder
    environment: Mapping[str, str]
    addresses: Sequence[str] = ()

    @property
    def python(self) -> str:
        """The interpreter on the hosts: by default the path of the one that runs this."""
        return self.ssh.python or sys.executable

    def command(self, node: int) -> list[str]:
        host = self.hosts[node]
        address = self.ssh.address or ",".join(("@ssh", *self.addresses))
        environment = {
            **passed_environment(self.environment, self.ssh.pass_env),
            **device_environment(host),
            "PYTHONSAFEPATH": "1",
        }
        variables = [f"{name}={value}" for name, value in environment.items()]
        program = [self.python, *self.order.arguments(address, node)]
        return ssh_command(self.ssh, host, ["env", *variables, *program])


@dataclass
class SshStarter:
    """Starts node agents by ssh, and says why an ssh has ended. folder: for what each ssh says."""

    agents: SshAgents
    folder: Path
    clients: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, nodes: Sequence[int]) -> None:
        """Start the ssh of each of these nodes; one that still runs is ended first."""
        _end([self.clients[node] for node in nodes if node in self.clients], 0.0)
        environment = {**self.agents.environment, **CLIENT_ENVIRONMENT}
        for node in nodes:
            with self._log(node).open("wb") as log:
                self.clients[node] = subprocess.Popen(
                    self.agents.command(node),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def failures(self) -> dict[int, Issue]:
        codes = {node: client.poll() for node, client in self.clients.items()}
        return {node: self._issue(node, code) for node, code in codes.items() if code is not None}

    def end(self) -> None:
        """Wait until every ssh has ended with its agent; end those that do not."""
        _end(list(self.clients.values()), END_SECONDS)

    def _issue(self, node: int, code: int) -> Issue:
        said = self._log(node).read_text("utf-8", errors="replace")
        agents = self.agents
        seconds = agents.ssh.connect_timeout
        return ssh_issue(agents.hosts[node], code, said, python=agents.python, seconds=seconds)

    def _log(self, node: int) -> Path:
        return self.folder / f"ssh-{node}.log"


class SshBackend:
    name = "ssh"
    job_id = None

    def __init__(self, job: JobSpec, environment: Mapping[str, str]) -> None:
        self.ssh, self.environment = job.launch.ssh, environment

    def check(self, plan: Plan) -> list[Issue]:
        issues = list(choose_hosts(plan.job).issues)
        if shutil.which("ssh", path=self.environment.get("PATH")) is None:
            hint = "install OpenSSH's client (apt-get install openssh-client)"
            issues.append(Issue("no-ssh", "--on", "there is no program ssh on this host", hint))
        return issues

    @contextmanager
    def connect(self, plan: Plan, run: RunDir, on_event: OnEvent) -> Iterator[AgentCluster]:
        chosen = choose_hosts(plan.job)
        for warning in chosen.warnings:
            on_event(warning)

        addresses = self._addresses(chosen.hosts)

        def starter(order: AgentOrder) -> SshStarter:
            return SshStarter(self._agents(chosen.hosts, order, addresses), run.nodes)

        names, patience = [host.name for host in chosen.hosts], plan.job.launch.start_seconds
        with agent_cluster(
            names, run, starter, on_event, patience=patience, addresses=addresses
        ) as cluster:
            yield cluster

    def commands(self, plan: LaunchPlan) -> list[HostCommand]:
        hosts = choose_hosts(plan.job).hosts
        order = AgentOrder(plan.run.path.resolve(), plan.run.nodes.resolve() / "key-ID", 0)
        agents = self._agents(hosts, order, self._addresses(hosts))
        return [
            HostCommand(node, host.name, tuple(agents.command(node)))
            for node, host in enumerate(hosts)
        ]

    def _agents(
        self, hosts: Sequence[SshHost], order: AgentOrder, addresses: Sequence[str]
    ) -> SshAgents:
        """addresses: those of `_addresses`; where it knows none, hosts try all of this host."""
        tried = addresses or own_addresses()
        return SshAgents(self.ssh, hosts, order, self.environment, tried)

    def _addresses(self, hosts: Sequence[SshHost]) -> list[str]:
        """The addresses of this host at which the hosts reach it; empty where that is not known, as
        of a host behind a jump host."""
        if self.ssh.address is not None:
            return [self.ssh.address] if self.ssh.address in every_address() else []
        with ThreadPoolExecutor(CONFIG_THREADS) as threads:
            names = list(threads.map(self._direct_name, hosts))
        known = [name for name in names if name is not None]
        return addresses_towards(known) if len(known) == len(hosts) else []

    def _direct_name(self, host: SshHost) -> str | None:
        """Where ssh connects to; None where that is another host, or ssh does not say."""
        environment = {**self.environment, **CLIENT_ENVIRONMENT}
        try:
            said = subprocess.run(
                config_command(self.ssh, host), env=environment, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, errors="replace", timeout=CONFIG_SECONDS,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return None
        return None if said.returncode else direct_name(said.stdout)


def _end(clients: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait so long for processes to end, then ask those that still run to, then kill them."""
    for wait, end in ((seconds, subprocess.Popen.terminate), (KILL_SECONDS, subprocess.Popen.kill)):
        deadline = time.monotonic() + wait
        while any(client.poll() is None for client in clients) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for client in clients:
            if client.poll() is None:
                end(client)
    for client in clients:
        with suppress(subprocess.TimeoutExpired):  # in a system call that does not return
            client.wait(KILL_SECONDS)


# ---------------------------------------------------------------- the command


def ssh_command(ssh: SshSpec, host: SshHost, remote: Sequence[str]) -> list[str]:
    """The command that runs the program `remote` on a host."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(ssh.connect_timeout),
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
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
