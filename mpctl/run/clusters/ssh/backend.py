"""`--on ssh`: a node agent on each host of a hostfile, started by the system's ssh client.

All hosts are contacted at once. The output of ssh and of its agent goes to RUN/nodes/ssh-N.log; if
an ssh ends before its agent has connected, failures.py finds the reason there.

ssh only starts an agent. The agent lives as long as its connection to the launcher's control
server: when the launcher ends or is killed, or the network is cut, it ends its ranks and exits, and
so does its ssh. An ssh client that is killed does no harm: the agent runs until the launcher sends
that the launch is over. For the same reason no terminal is requested (ssh -T), and each ssh leads a
separate session, so that Ctrl-C or a closed terminal reaches the launcher alone.

The user's ~/.ssh/config, keys, agent and jump hosts work. Options that mpctl sets win over them,
because ssh takes the first value it reads:

    BatchMode=yes              never ask for a password or about a host key: fail, with a message
    ConnectTimeout=N           launch.ssh.connect_timeout
    ServerAliveInterval=5, ServerAliveCountMax=3
                               a host that has not answered for 15 s ends the ssh
    LogLevel=INFO              messages that failures.py recognises, also under a config's QUIET
    ControlMaster=no           never become a shared connection, which would outlive the launch;
                               one that the user has opened is used
    ClearAllForwardings=yes    the config's port forwardings are meant for one session, not for two
    RemoteCommand=none, -T     the command below and no terminal, whatever the config has

ssh joins its arguments with spaces, and the remote user's login shell splits them again. The remote
command is therefore quoted as one word (shlex.join) that begins with exec: the shell is replaced by
the program, and a signal to one reaches the other.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mpctl.core.errors import Issue
from mpctl.plan.planning.plan import Plan
from mpctl.records.rundir.directory import RunDir
from mpctl.run.clusters.backend import OnEvent
from mpctl.run.clusters.ssh.failures import ssh_issue
from mpctl.run.clusters.ssh.hostfile import HostList, SshHost, first_slots, hosts_of_plan, read_hostfile, select_hosts
from mpctl.run.hosts.network import addresses_towards, every_address, own_addresses
from mpctl.run.launch.control.cluster import AgentCluster, AgentOrder, agent_cluster
from mpctl.run.launch.launch_plan import HostCommand, LaunchPlan
from mpctl.run.launch.node.processes import end_processes
from mpctl.spec.job import JobSpec
from mpctl.spec.launch import SshSpec

END_SECONDS, KILL_SECONDS = 4.0, 1.0
"""Time limits for an ssh to end after its agent was sent that the launch is over, and after SIGTERM. An agent ends
without its ssh, too."""

CONFIG_THREADS, CONFIG_SECONDS = 16, 10.0
"""Number of hosts for which ssh prints its configuration (ssh -G) at once, and the time limit."""

NO_SSH = Issue(
    "no-ssh",
    "--on",
    "there is no program ssh on this host",
    "install OpenSSH's client (apt-get install openssh-client)",
)

CLIENT_ENVIRONMENT = {"LC_ALL": "C.UTF-8"}
"""Environment variables of the ssh client: its messages in English, which failures.py reads."""

PASSED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "KMP_", "UCX_", "FI_", "TRITON_", "MPCTL_")
PASSED_NAMES = ("PYTHONPATH", "PYTHONHASHSEED", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING")
"""Variables of the launcher's environment that are passed to every host: those that tune torch,
NCCL, gloo and OpenMP, and where Python finds modules. Others, such as tokens and passwords, do not,
since a command line can be read by every user of a host; `launch.ssh.pass_env` names more."""


def choose_hosts(job: JobSpec) -> HostList:
    """The hosts of a job, in the order of the plan's nodes, then its spare hosts, with everything
    that is wrong."""
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
    spares = job.launch.spare_nodes
    return hosts_of_plan(chosen.hosts, cluster.nodes, ranks, ssh.hostfile, spares=spares)


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


@dataclass
class SshStarter:
    """Starts the node agent of each host by ssh, and finds out why an ssh has ended; the output of
    each ssh is logged next to the key. environment: of the launcher; addresses: of the launcher's
    host, for hosts that reach it at another address than the one ssh came from."""

    ssh: SshSpec
    hosts: Sequence[SshHost]
    order: AgentOrder
    environment: Mapping[str, str]
    addresses: Sequence[str] = ()
    clients: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def python(self) -> str:
        """The interpreter on the hosts: by default the path of the one that runs this."""
        return self.ssh.python or sys.executable

    def command(self, node: int) -> list[str]:
        """A pure function of the fields."""
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

    def start(self, nodes: Sequence[int]) -> None:
        """Start the ssh of each of these nodes; one that still runs is ended first."""
        running = [self.clients[node] for node in nodes if node in self.clients]
        end_processes(running, 0.0, KILL_SECONDS)
        for node in nodes:
            with self._log(node).open("wb") as log:
                self.clients[node] = subprocess.Popen(
                    self.command(node),
                    env={**self.environment, **CLIENT_ENVIRONMENT},
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
        end_processes([*self.clients.values()], END_SECONDS, KILL_SECONDS)

    def _issue(self, node: int, code: int) -> Issue:
        try:
            said = self._log(node).read_text("utf-8", errors="replace")
        except OSError as error:  # it was removed
            said = f"its log {self._log(node)} cannot be read: {error.strerror}"
        seconds = self.ssh.connect_timeout
        return ssh_issue(self.hosts[node], code, said, python=self.python, seconds=seconds)

    def _log(self, node: int) -> Path:
        return self.order.key.with_name(f"ssh-{node}.log")


class SshBackend:
    name = "ssh"
    job_id = None

    def __init__(self, job: JobSpec, environment: Mapping[str, str]) -> None:
        self.ssh, self.environment = job.launch.ssh, environment

    def check(self, plan: Plan) -> list[Issue]:
        issues = list(choose_hosts(plan.job).issues)
        if shutil.which("ssh", path=self.environment.get("PATH")) is None:
            issues.append(NO_SSH)
        return issues

    @contextmanager
    def connect(self, plan: Plan, run: RunDir, on_event: OnEvent) -> Iterator[AgentCluster]:
        chosen = choose_hosts(plan.job)
        for warning in chosen.warnings:
            on_event(warning)
        addresses = self._addresses(chosen.hosts)
        with agent_cluster(
            [host.name for host in chosen.hosts],
            run,
            lambda order: self._starter(chosen.hosts, order, addresses),
            on_event,
            patience=plan.job.launch.start_seconds,
            silence=plan.job.launch.silence_seconds,
            addresses=addresses,
            nodes=plan.job.cluster.nodes,
            exclude_after=plan.job.launch.most_blames,
        ) as cluster:
            yield cluster

    def commands(self, plan: LaunchPlan) -> list[HostCommand]:
        hosts = choose_hosts(plan.job).hosts
        order = AgentOrder.of(plan.run, seconds=plan.job.launch.start_seconds)
        starter = self._starter(hosts, order, self._addresses(hosts))
        return [HostCommand(node, host.name, tuple(starter.command(node))) for node, host in enumerate(hosts)]

    def _starter(self, hosts: Sequence[SshHost], order: AgentOrder, addresses: Sequence[str]) -> SshStarter:
        """addresses: those of `_addresses`; if empty, hosts try all addresses of this host."""
        return SshStarter(self.ssh, hosts, order, self.environment, addresses or own_addresses())

    def _addresses(self, hosts: Sequence[SshHost]) -> list[str]:
        """Return the addresses of this host for the hosts; empty if unknown, as for a host behind a jump host."""
        if self.ssh.address is not None:
            return [self.ssh.address] if self.ssh.address in every_address() else []
        with ThreadPoolExecutor(CONFIG_THREADS) as threads:
            names = list(threads.map(self._direct_name, hosts))
        known = [name for name in names if name is not None]
        return addresses_towards(known) if len(known) == len(hosts) else []

    def _direct_name(self, host: SshHost) -> str | None:
        """The name or address that ssh connects to by the user's config; None if it uses a jump
        host or a command, or prints none."""
        port = [] if host.port is None else ["-p", str(host.port)]
        try:
            said = subprocess.run(
                ["ssh", "-G", *_config(self.ssh), *port, "--", host.destination],
                env={**self.environment, **CLIENT_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=CONFIG_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        pairs = (line.partition(" ") for line in said.stdout.splitlines())
        settings = {key: value for key, _, value in pairs}
        proxies = (settings.get(key, "none") for key in ("proxyjump", "proxycommand"))
        is_direct = said.returncode == 0 and all(proxy == "none" for proxy in proxies)
        return settings.get("hostname") if is_direct else None


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
    set_here = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    port = [] if host.port is None else ["-p", str(host.port)]
    command = ["ssh", "-T", *_config(ssh), *set_here, *port, "--", host.destination]
    return [*command, f"exec {shlex.join(remote)}"]


def _config(ssh: SshSpec) -> list[str]:
    return [] if ssh.config is None else ["-F", ssh.config]


def passed_environment(environment: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """The variables of the launcher that are passed to every host. more: names of others."""
    names = {*PASSED_NAMES, *more}
    return {
        name: value for name, value in sorted(environment.items()) if name in names or name.startswith(PASSED_PREFIXES)
    }


def device_environment(host: SshHost) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES where a hostfile or a filter chose slots of a host."""
    if host.slots is None or host.slots == tuple(range(len(host.slots))):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.slots))}
