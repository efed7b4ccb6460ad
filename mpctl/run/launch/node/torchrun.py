"""Starting the ranks of this host: by torchrun for an attempt to train, directly for tasks.

torchrun gets static rendezvous (exact ranks) and no restarts: restarted workers reuse the store of
the attempt before and hang (pytorch#135712), so every attempt is a fresh torchrun. It runs in a
separate session, so that Ctrl-C in the terminal reaches the launcher only. If the process that
started it is killed, the launcher or a node agent, the kernel kills torchrun (train/runtime/torchrun.py),
and with it the ranks.

torchrun imports torch for more than a second before it starts a rank, and a rank that is a new
process does so again. So ranks are forked from torchrun (train/runtime/forking.py; `launch.warm_start`),
and a process that has imported torch waits (WaitingTorchrun) while the launcher checks the job.
Where attempts may follow, the next one waits from an attempt's second step on, on each host. It
reads torchrun's arguments as one line of JSON on its standard input, and exits when that closes.

Libraries read some variables when they are imported (OMP_NUM_THREADS, the allocator's). Ranks are
only forked from a process that began with the variables that they are to have, except for
ATTEMPT_VARIABLES, which differ from one attempt to the next and are read by mpctl alone.

Ranks on GPUs start with settings of torch's allocator and of its flight recorder. A variable that
the user has set is left unchanged, even if empty, so that any of them can be turned off:
`PYTORCH_ALLOC_CONF= mpctl launch ...`.

- `expandable_segments:True`: the allocator maps memory page by page into segments that grow, so
  that free blocks between others are not lost when sizes change from step to step (torch's notes on
  CUDA semantics).
- in a pipeline `CUDA_DEVICE_MAX_CONNECTIONS=32`: the queues between host and GPU, 1 to 32, 8 by
  default (CUDA's environment variables). A stage has up to 14 streams (its kernels, one for each
  group and link, copies); streams that share a queue wait for each other.
- torch's flight recorder notes the last collectives of each process group; when NCCL's watchdog
  ends a rank, it writes them to a file of that rank, by default below ~/.cache, where the next run
  replaces them. Here they are written to RUN/logs (rank 3: RUN/logs/nccl_trace_rank_3), and
  `torchfrtrace` reads them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import psutil

from mpctl.records.rundir.breadcrumb import BREADCRUMBS
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.marker import COMMAND
from mpctl.records.rundir.origin import ORIGIN
from mpctl.records.rundir.program import ATTEMPT, RUN_DIR
from mpctl.run.hosts.network import HOST, free_port
from mpctl.run.launch.attempt import STOPPED, AttemptPhase, NodeState
from mpctl.run.launch.node.processes import UNREADABLE, HostRanks, kill_tree
from mpctl.run.launch.node.program import HostProgram
from mpctl.spec.job import JobSpec
from mpctl.spec.launch import StopSignal

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names under which torch reads the allocator's settings; the first is torch's own since 2.9."""
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_QUEUES = "32"
RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT")
TRACE_ENTRIES = "2000"
"""Collectives that the flight recorder keeps for the record of a time-out."""
LAUNCHER = "MPCTL_LAUNCHER"
"""Environment variable of torchrun: the process id of its parent, with which it ends."""
WAITING = "--waiting"
FORK = "MPCTL_FORK"
"""Environment variable of torchrun: it is to import what ranks import, and may fork them."""
NICENESS = 10
"""The niceness of a process that imports torch while ranks train."""
STEP = re.compile(r"step \d+")
"""Start of the activity text of a rank that trains (train/runtime/activity.py)."""
ATTEMPT_VARIABLES = frozenset({*ORIGIN, ATTEMPT, BREADCRUMBS})
RANK_VARIABLES = frozenset(
    {
        "OMP_NUM_THREADS",
        "PYTHONUNBUFFERED",
        "PYTHONSAFEPATH",
        "CUDA_VISIBLE_DEVICES",
        ALLOCATOR[0],
        QUEUES,
        *RECORDER,
        *ORIGIN,
        ATTEMPT,
    }
)
"""The variables that a launcher may set for ranks of other hosts; an agent refuses all others."""


def allocator_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Settings of the allocator on a GPU; empty if the environment already has any."""
    if any(name in environment for name in ALLOCATOR):
        return {}
    return {ALLOCATOR[0]: "expandable_segments:True"}


def recorder_variables(run: RunDir, environment: Mapping[str, str]) -> dict[str, str]:
    """Settings of the flight recorder for ranks of a run, except those in the environment."""
    ours = zip(RECORDER, (TRACE_ENTRIES, str(run.collective_trace), "1"), strict=True)
    return {name: value for name, value in ours if name not in environment}


class WaitingTorchrun:
    """A torchrun process that waits for its arguments. Its command line has the path of the run directory, by which
    people and `mpctl runs` recognise it. variables: of ranks that may be forked from it, or None."""

    def __init__(self, run: Path, variables: Mapping[str, str] | None = None, niceness: int = 0) -> None:
        """Start it. niceness: while it imports. Raises OSError when it cannot be started."""
        self.variables = None if variables is None else lasting(variables)
        own = {} if self.variables is None else {**self.variables, FORK: "1"}
        command = [sys.executable, "-m", "mpctl.train.runtime.torchrun", WAITING, str(run.resolve())]
        self.process = subprocess.Popen(
            [*command, str(niceness)],
            env={**os.environ, "PYTHONSAFEPATH": "1", **own, LAUNCHER: str(os.getpid())},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def is_waiting(self) -> bool:
        """Whether it still waits for its arguments."""
        return self.process.stdin is not None and not self.process.stdin.closed

    def order(self, arguments: Sequence[str], env: Mapping[str, str], log: Path) -> bool:
        """Run torchrun with these arguments and append its output to a log. Returns False when the
        process has already ended; starting another one then shows why."""
        fork = self.variables is not None and self.variables == lasting(env)
        self.continue_stopped()
        order = {"arguments": list(arguments), "env": dict(env), "log": str(log), "fork": fork}
        line = json.dumps(order)
        if self.process.poll() is not None or self.process.stdin is None:
            return False
        try:
            with self.process.stdin as stdin:
                stdin.write(os.fsencode(line) + b"\n")
        except OSError:
            return False
        return True

    def continue_stopped(self) -> None:
        """Continue the process if something has stopped it: it would not read its arguments. It
        has no ranks that could be meant to stay stopped."""
        with suppress(*UNREADABLE):
            if psutil.Process(self.process.pid).status() in STOPPED:
                self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self.process.stdin is not None and self.is_waiting:
            with suppress(OSError):
                self.process.stdin.close()
            kill_tree(self.process)


def lasting(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables for ranks without those that differ between attempts."""
    return {name: text for name, text in variables.items() if name not in ATTEMPT_VARIABLES}


@dataclass
class SpareTorchrun:
    """Starter of the next attempt on this host: a waiting process, or none."""

    waiting: WaitingTorchrun | None = None

    def take(self) -> WaitingTorchrun | None:
        """The process, which belongs to the caller from now on."""
        waiting, self.waiting = self.waiting, None
        return waiting

    def end(self) -> None:
        if self.waiting is not None:
            self.waiting.end()


def rank_environment(job: JobSpec) -> dict[str, str]:
    """The variables that every rank needs in addition to those of this process and to those that
    torchrun sets. The job's device and threads must be filled in."""
    environment = {"OMP_NUM_THREADS": str(job.launch.threads_per_rank), "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    if job.launch.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if job.launch.device == "cuda":
        environment |= allocator_variables(os.environ)
        # A program's streams are not known, and Megatron-Core wants a single queue.
        if job.parallel.pp > 1 and not job.launch.program and QUEUES not in os.environ:
            environment[QUEUES] = MOST_QUEUES
    return environment


def one_host_environment(job: JobSpec) -> dict[str, str]:
    """rank_environment when all ranks run on this host: on CPU they use the loopback."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    return {**rank_environment(job), **(loopback if job.launch.device == "cpu" else {})}


@dataclass(frozen=True)
class NodeStart:
    """The arguments of torchrun on one host. node: the host's index, below `nnodes`; address, port:
    the rendezvous of all ranks, on the first host; env: variables added to the environment. fork:
    whether ranks are forked from torchrun; is_repeated: whether another attempt may follow. module:
    what a rank runs, of mpctl.train.runtime; stop_signal: how a program learns that it is to stop."""

    node: int
    nnodes: int
    ranks_per_node: int
    address: str
    port: int
    env: Mapping[str, str] = field(default_factory=dict)
    fork: bool = False
    is_repeated: bool = False
    module: Literal["worker", "program"] = "worker"
    stop_signal: StopSignal = "none"

    @property
    def place(self) -> str:
        """The rendezvous address: `10.0.0.1:29500`, `[fe00::1]:29500`."""
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"{address}:{self.port}"

    @property
    def ranks(self) -> range:
        return range(self.node * self.ranks_per_node, (self.node + 1) * self.ranks_per_node)


def torchrun_command(run_dir: Path, start: NodeStart) -> list[str]:
    return [
        sys.executable,
        "-m",
        "mpctl.train.runtime.torchrun",
        f"--nnodes={start.nnodes}",
        f"--nproc-per-node={start.ranks_per_node}",
        "--rdzv-backend=mpctl",
        f"--rdzv-endpoint={start.place}",
        f"--rdzv-conf=rank={start.node}",
        "--max-restarts=0",
        "-m",
        f"mpctl.train.runtime.{start.module}",
        str(run_dir.resolve()),
    ]


def task_environments(job: JobSpec) -> Iterator[dict[str, str]]:
    """The environment of each rank of a task, in order of rank: with the variables that torchrun
    would set. Raises RunFailed when the ranks cannot connect on this host."""
    world_size = job.world_size
    common = {
        **one_host_environment(job),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(free_port(world_size)),
    }
    for rank in range(world_size):
        yield {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def host_program(run: RunDir, start: NodeStart) -> HostProgram | None:
    """Return the supervision of a program's ranks on this host; None if they train."""
    return None if start.module == "worker" else HostProgram(run, start.stop_signal)


class NodeTorchrun(HostRanks):
    """torchrun of one attempt on this host, and its ranks. next_spare: for the next attempt, until
    its process is started; first_step: the first one that a rank was seen in, such as `step 3`."""

    def __init__(self, run: RunDir, start: NodeStart, spare: SpareTorchrun | None = None) -> None:
        """Start torchrun, its output appended to its log. spare: of this host, for all attempts.
        Raises OSError when it cannot start."""
        super().__init__(run, start.node, start.ranks, host_program(run, start))
        self.start, self.first_step = start, ""
        self.next_spare = spare if start.fork and start.is_repeated else None
        self.log = run.node_log(start.node)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = torchrun_command(run.path, start)
        with self.log.open("ab") as log:
            log.write(os.fsencode(f"{COMMAND}{shlex.join(command)}\n"))
        env = {**start.env, **self.breadcrumbs.environment}
        if self.program is not None:  # by which it is seen what the program leaves
            env[RUN_DIR] = str(run.path.resolve())
            self.program.end_orphans()
        waiting = None if spare is None else spare.take()
        if waiting is not None and waiting.order(command[3:], env, self.log.resolve()):
            self.process = waiting.process
        else:
            self.process = self._start(command, {**env, FORK: "1"} if start.fork else env)

    def _start(self, command: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command,
                env={**os.environ, **env, LAUNCHER: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def poll(self) -> AttemptPhase:
        """As HostRanks. Once a step is done, so that no core is taken from the start, the process
        for the next attempt is started."""
        phase = super().poll()
        if self.next_spare is not None and phase is AttemptPhase.RUNNING and self._has_trained():
            with suppress(OSError):  # then the next attempt imports torch itself
                waiting = WaitingTorchrun(self.run.path, self.start.env, NICENESS)
                self.next_spare.waiting = waiting
            self.next_spare = None
        return phase

    def _has_trained(self) -> bool:
        """Whether the first rank of this host has gone on from the first step that it was in."""
        step = STEP.match(self.breadcrumbs.state(self.ranks[0]).doing)
        if step is None:
            return False
        self.first_step = self.first_step or step[0]
        return step[0] != self.first_step

    def snapshot(self) -> NodeState:
        """The current state of torchrun and the ranks."""
        state, torchrun = super().snapshot(), ""
        with suppress(*UNREADABLE):
            torchrun = str(psutil.Process(self.process.pid).status()) if state.code is None else ""
        return replace(
            state,
            torchrun=torchrun,
            killed_by=max(0, -(state.code or 0)) if not self.is_ended else 0,
            exit_codes=self.breadcrumbs.exit_codes,
            terminated=self.breadcrumbs.terminated,
        )
