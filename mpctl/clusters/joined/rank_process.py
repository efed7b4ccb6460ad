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
from mpctl.launch.attempt import NodeState, RankState
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

    def poll(self) -> int | None:
        """The worker's exit code, negative for a signal that ended it; None while it runs."""
        return self.worker.poll()

    @property
    def has_failed(self) -> bool:
        """Whether the worker has ended with an error or recorded a failure."""
        return bool(self.poll()) or self.breadcrumbs.has_failed

    def look(self) -> NodeState:
        """The state of the rank."""
        code = self.poll()
        return NodeState(
            node=self.rank,
            host=socket.gethostname(),
            ranks={self.rank: self._state()},
            code=code,
            exit_codes={self.rank: code} if code and not self.is_ended else {},
            failures=self.run.failure_records([self.rank]) if self.has_failed else (),
            memory_kills=memory_kills() - self.kills,
        )

    def end(self) -> NodeState:
        """Kill the worker if it still runs; the last state."""
        self.is_ended = self.poll() is None
        unkilled = kill_tree(self.worker)
        self.breadcrumbs.close()
        return replace(self.look(), unkilled=unkilled)

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
