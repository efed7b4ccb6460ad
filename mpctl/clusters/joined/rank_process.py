"""One rank as a child of the process that another program started for it.

Where a world has a process a rank, torchrun is not needed: each of these processes starts the
worker of its rank itself, anew for every attempt. The worker gets an address of this attempt, never
that of the program which started the world: the store there still has the keys of the attempt
before (pytorch#135712).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace

import psutil

from mpctl.hosts.machine import memory_kills
from mpctl.launch.attempt import AttemptPhase, NodeState, RankState
from mpctl.launch.node.processes import UNREADABLE, kill_tree, process_state, rank_stacks
from mpctl.launch.node.torchrun import NodeStart
from mpctl.rundir.breadcrumb import HostBreadcrumbs
from mpctl.rundir.directory import RunDir


class RankProcess:
    """The worker of one rank; `start.node` is the rank, `start.nnodes` the size of the world."""

    def __init__(self, run: RunDir, start: NodeStart, *, local_rank: int) -> None:
        """Start the worker. Raises OSError when it cannot start."""
        self.run, self.rank, self.kills = run, start.node, memory_kills()
        self.is_ended = False  # by `end`
        self.breadcrumbs = HostBreadcrumbs((self.rank,), run.path)
        log = run.log(self.rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = rank_variables(start, local_rank, os.environ) | self.breadcrumbs.environment
        before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the worker inherits that
        try:
            with log.open("ab") as output:
                self.worker = subprocess.Popen(
                    [sys.executable, "-m", "mpctl.runtime.worker", str(run.path.resolve())],
                    env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    start_new_session=True,  # signals to this process's group are not for it
                )  # fmt: skip
        finally:
            signal.signal(signal.SIGUSR1, before)

    def poll(self) -> AttemptPhase:
        """How far the rank is."""
        crumbs = self.breadcrumbs
        return AttemptPhase.of(
            self.worker.poll(), is_failing=crumbs.has_failed, has_joined=crumbs.has_joined
        )

    def snapshot(self) -> NodeState:
        """The state of the rank; code: the worker's, negative for a signal that ended it."""
        code = self.worker.poll()
        return NodeState(
            node=self.rank,
            host=socket.gethostname(),
            ranks={self.rank: self._state()},
            code=code,
            exit_codes={self.rank: code} if code and not self.is_ended else {},
            failures=self.breadcrumbs.failures(),
            memory_kills=memory_kills() - self.kills,
        )

    def end(self) -> NodeState:
        """Kill the worker if it still runs; the last state."""
        self.is_ended = self.worker.poll() is None
        unkilled = kill_tree(self.worker)
        self.breadcrumbs.close()
        return replace(self.snapshot(), unkilled=unkilled)

    def request_stop(self) -> None:
        """Have the rank finish its step, save and end."""
        self.breadcrumbs.request_stop()

    def stacks(self) -> dict[int, str]:
        """Where the main thread of the rank is, if it answers."""
        process = self._process()
        ranks = {} if process is None else {self.rank: process}
        return rank_stacks(self.run, ranks, self.breadcrumbs)

    def _state(self) -> RankState:
        return process_state(self._process(), self.breadcrumbs.state(self.rank))

    def _process(self) -> psutil.Process | None:
        try:
            return psutil.Process(self.worker.pid)
        except UNREADABLE:
            return None


def rank_variables(
    start: NodeStart, local_rank: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a worker: this one without the variables of an outer torchrun, with those
    that torchrun would set. A process that is shown a single GPU uses that one, whatever its number
    on the host (srun --gpus-per-task)."""
    outer = {name: value for name, value in environment.items() if "TORCHELASTIC" not in name}
    visible = {**environment, **start.env}.get("CUDA_VISIBLE_DEVICES", "")
    is_alone = bool(visible) and "," not in visible
    return {
        **outer,
        **start.env,
        "RANK": str(start.node),
        "LOCAL_RANK": str(0 if is_alone else local_rank),
        "WORLD_SIZE": str(start.nnodes),
        "MASTER_ADDR": start.address,
        "MASTER_PORT": str(start.port),
    }
