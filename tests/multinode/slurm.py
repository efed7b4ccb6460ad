"""A Slurm of two or more nodes on this machine: munged, slurmctld and the slurmd on 127.0.0.1.

    with slurm_cluster(folder) as cluster:
        cluster.run(["sbatch", "job.sh"])

It has a munge key and socket, a configuration, ports and spool folders of its own in `folder`, so
that it disturbs no other Slurm. Nodes n1, n2, ... have two CPUs each and share this machine. Slurm
is told that each also has two GPUs (empty files for devices), so that what it says about GPUs can
be read.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.multinode.daemons import Daemon, free_ports, wait_until
from tests.multinode.needs import program

NODES = ("n1", "n2")
NODE = "MPCTL_TEST_NODE"
"""Environment variable of a slurmd, and so of its slurmstepds: the name of the node."""
CONFIG = """\
ClusterName=mpctl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout={slurmd_seconds}
KillWait=5
InactiveLimit=0
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=100000
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
GresTypes=gpu
NodeName={listed} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] \
CPUs=2 RealMemory=4000 Gres=gpu:2
PartitionName=main Nodes={listed} Default=YES State=UP OverSubscribe=FORCE:4
PartitionName=short Nodes={listed} State=UP OverSubscribe=FORCE:4 MaxTime=1
PartitionName=one Nodes=n1 State=UP OverSubscribe=FORCE:4
PartitionName=closed Nodes={listed} State=DOWN
"""
GRES = "NodeName={listed} Name=gpu File={folder}/gpu[0-1] Flags=nvidia_gpu_env\n"


@dataclass
class SlurmCluster:
    """A running Slurm. env: the environment in which its commands find it; nodes: the slurmd of
    each node, by the node's name."""

    folder: Path
    env: dict[str, str]
    nodes: dict[str, Daemon] = field(default_factory=dict)

    def run(
        self, command: Sequence[str], *, seconds: float = 60, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, with its output."""
        return subprocess.run(
            [*command],
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def mpctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`mpctl` with these arguments, on a host of the cluster."""
        return self.run([sys.executable, "-m", "mpctl", *arguments], seconds=120)

    def states(self) -> dict[str, str]:
        """The state of each node, as sinfo shows it: `idle`, `mixed`, `down*`."""
        listing = self.run(["sinfo", "-hN", "-p", "main", "-o", "%N %t"]).stdout
        return dict(line.split() for line in listing.splitlines())

    def jobs(self) -> dict[str, str]:
        """The state of each job that Slurm still knows, by its id."""
        listing = self.run(["squeue", "-ha", "-t", "all", "-o", "%i %T"]).stdout
        return dict(line.split() for line in listing.splitlines())

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """Processes that run in jobs of this cluster, on one node or on all, and the slurmstepd of
        each step."""
        daemons = {daemon.process.pid for daemon in self.nodes.values()}
        return [p for p in psutil.process_iter() if p.pid not in daemons and self._has(p, node)]

    def _has(self, process: psutil.Process, node: str | None) -> bool:
        """Whether a process was started by a slurmd of this cluster (on a node): its environment
        says so. A slurmstepd has the environment of its slurmd."""
        try:
            environment = process.environ()
            is_ours = environment.get("SLURM_CONF") == self.env["SLURM_CONF"]
            is_job = "SLURM_JOB_ID" in environment or "slurmstepd" in process.name()
            here = environment.get("SLURMD_NODENAME", environment.get(NODE))
        except (psutil.Error, OSError):
            return False
        return is_ours and is_job and node in (None, here)

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        command = [_path("slurmd"), "-D", "-N", name, "-f", self.env["SLURM_CONF"]]
        self.nodes[name] = Daemon(command, self.folder / f"{name}.out", {**self.env, NODE: name})

    def wait_for(self, job: str, states: set[str], seconds: float) -> str:
        """Wait until a job is in one of these states; the state."""
        wait_until(
            lambda: self.jobs().get(job, "GONE") in states,
            seconds,
            lambda: f"job {job} in {states}, but {self.jobs()}\n{self.logs()}",
        )
        return self.jobs().get(job, "GONE")

    def cancel_all(self) -> None:
        """Cancel every job and wait until all their processes have ended."""
        for job in self.jobs():
            self.run(["scancel", job])
        wait_until(lambda: not self.processes(), 30, lambda: f"no processes: {self.processes()}")

    def logs(self) -> str:
        """The end of each daemon's log."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text("utf-8", errors="replace").splitlines()
            parts += [f"--- {path.name}", *lines[-15:]]
        return "\n".join(parts)


@contextmanager
def slurm_cluster(folder: Path, *, names: Sequence[str] = NODES, slurmd_seconds: int = 60) -> Iterator[SlurmCluster]:
    """A Slurm that runs inside of the block. names: n1, n2, ...; slurmd_seconds: after which a
    silent node is down."""
    cluster = _configured(folder, len(names), slurmd_seconds)
    munge = [
        _path("munged"),
        "--foreground",
        "--force",
        f"--key-file={folder}/munge.key",
        f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munge.pid",
        f"--log-file={folder}/munge.log",
        f"--seed-file={folder}/munge.seed",
        "--num-threads=2",
    ]
    daemons = [Daemon(munge, folder / "munge.out", cluster.env)]
    try:
        wait_until((folder / "munge.socket").exists, 10, cluster.logs)
        controller = [_path("slurmctld"), "-D", "-c", "-f", cluster.env["SLURM_CONF"]]
        daemons.append(Daemon(controller, folder / "slurmctld.out", cluster.env))
        for name in names:
            cluster.start_node(name)
        wait_until(lambda: cluster.states() == dict.fromkeys(names, "idle"), 30, cluster.logs)
        yield cluster
    finally:
        _take_down(cluster, daemons)


def _take_down(cluster: SlurmCluster, daemons: list[Daemon]) -> None:
    """Cancel the jobs, end the daemons, and kill what is left of the jobs."""
    with suppress(AssertionError, subprocess.TimeoutExpired):
        cluster.cancel_all()
    for daemon in [*cluster.nodes.values(), *reversed(daemons)]:
        daemon.end()
    for process in cluster.processes():
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _configured(folder: Path, count: int, slurmd_seconds: int) -> SlurmCluster:
    """Write the configuration of so many nodes. munged refuses a folder that others may write."""
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(64))
    first, last = _adjacent_ports(count)
    listed = f"n[1-{count}]"
    text = CONFIG.format(
        folder=folder,
        listed=listed,
        host=socket.gethostname().partition(".")[0],
        ctld_port=free_ports(1)[0],
        first_port=first,
        last_port=last,
        slurmd_seconds=slurmd_seconds,
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(GRES.format(folder=folder, listed=listed))
    for number in range(2):
        (folder / f"gpu{number}").touch()
    ours = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return SlurmCluster(folder, {**ours, "SLURM_CONF": str(folder / "slurm.conf")})


def _adjacent_ports(count: int) -> tuple[int, int]:
    """The first and the last of so many free ports that follow each other."""
    while True:
        (first,) = free_ports(1)
        with ExitStack() as opened, suppress(OSError, OverflowError):
            for port in range(first + 1, first + count):
                opened.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first, first + count - 1


def _path(name: str) -> str:
    path = program(name)
    assert path is not None, f"no {name}"
    return path
