"""The agent of one process of a joined world.

The first process starts its own as a child:

    python -m mpctl.run.clusters.torchrun.agent RUN --connect HOST:PORT --key FILE --node RANK

Every other process of the world becomes an agent itself (`follow_launcher`): it finds the launcher
in RUN/nodes/meeting.json, obeys it, and ends when the launch is over. When the connection breaks it
ends its ranks and searches for the launcher again for a while, so that it joins a launcher that was
restarted.

A signal that asks this process to end is passed on to the launcher through RUN/stop-request: a
scheduler sends it to one process or to all, and ranks can only stop and save together. A second one
ends the ranks at once.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType

import psutil

from mpctl.core.durable import refresh
from mpctl.core.errors import RunFailed
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.launcher import stop_signal, write_stop_request
from mpctl.run.clusters.backend import JOB_VARIABLES
from mpctl.run.clusters.torchrun.meeting import read_meeting
from mpctl.run.clusters.torchrun.world import JoinedWorld, describe_process, require_world
from mpctl.run.launch.attempt import NodeState
from mpctl.run.launch.control.messages import read_key
from mpctl.run.launch.node.agent import REQUESTS, Agent, NodeStarter, connect_once, main, say_hello
from mpctl.run.launch.node.processes import UNREADABLE, HostRanks
from mpctl.run.launch.node.torchrun import NodeStart, host_program

JOB_VARIABLE = JOB_VARIABLES["kubernetes"]
JOINED_REQUESTS = {**REQUESTS, "joined_process": describe_process}
POLL_SECONDS = 0.2
CONNECT_SECONDS = 10.0
RETURN_SECONDS = 30.0
"""Time that a process waits for the launcher to come back after the connection broke. In a pod, which may be replaced
on another node, the limit is that of a launcher that starts."""


class RankProcess(HostRanks):
    """The worker of one rank; `start.node` is the rank, `start.nnodes` the size of the world."""

    def __init__(self, run: RunDir, start: NodeStart, *, local_rank: int) -> None:
        """Start the worker. Raises OSError when it cannot start."""
        super().__init__(run, start.node, (start.node,), host_program(run, start))
        log = run.log(start.node)
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = rank_variables(start, local_rank, os.environ) | self.breadcrumbs.environment
        before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the worker inherits this
        try:
            with log.open("ab") as output:
                self.process = subprocess.Popen(
                    rank_command(run, start),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # signals to this process's group are not for it
                )
        finally:
            signal.signal(signal.SIGUSR1, before)
        with suppress(*UNREADABLE):
            self.found[start.node] = psutil.Process(self.process.pid)

    def snapshot(self) -> NodeState:
        """The current state of the rank; there is no torchrun that reports its exit code."""
        state = super().snapshot()
        has_failed = bool(state.code) and not self.is_ended
        return replace(state, exit_codes={self.node: state.code or 0} if has_failed else {})


def rank_command(run: RunDir, start: NodeStart) -> list[str]:
    """The command of a rank that no torchrun starts."""
    return [sys.executable, "-m", f"mpctl.train.runtime.{start.module}", str(run.path.resolve())]


def rank_variables(start: NodeStart, local_rank: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker: this one without the variables of an outer torchrun, with those
    that torchrun would set. A process that sees a single GPU uses that one, whatever its number on
    the host (srun --gpus-per-task)."""
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


def node_starter(world: JoinedWorld) -> NodeStarter | None:
    """Return the starter of a process's ranks: None (torchrun) for a whole node, else one worker."""
    return None if world.level == "node" else partial(RankProcess, local_rank=world.local)


@dataclass
class SignalRelay:
    """Forwards signals that ask for an end to the launcher. received: how many have come; last: the
    latest; is_connected: whether there is a launcher to forward them to."""

    run: RunDir
    received: int = 0
    last: int = 0
    is_connected: bool = False
    numbers: tuple[signal.Signals, ...] = field(default=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1))

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._receive) for number in self.numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received, self.last = self.received + 1, number
        if not self.is_connected or self.received > 2:
            raise SystemExit(128 + number)
        with suppress(OSError):  # else only a signal to the launcher itself can stop it
            write_stop_request(self.run.stop_request, now=self.received > 1, relayed=True)


def follow_launcher(run: RunDir, world: JoinedWorld, seconds: float) -> None:
    """Be the agent of this process until the launch is over.

    seconds: longest wait for the launcher. Raises RunFailed when there is none in time, or when it
    was lost and did not come back; SystemExit where a signal stopped the launch, whichever process
    received it: a process that succeeds is not started again with those that continue the run.
    """
    relay, returns = SignalRelay(run), seconds if JOB_VARIABLE in os.environ else RETURN_SECONDS
    deadline, is_lost = time.monotonic() + seconds, False
    with relay.listening():
        while time.monotonic() < deadline:
            agent = _agent(run, world)
            if agent is None:
                time.sleep(POLL_SECONDS)
                continue
            relay.is_connected = True
            agent.serve()
            relay.is_connected = False
            if agent.is_over:
                refresh(run.path)
                if number := stop_signal(run.summary, run.stop_request):
                    raise SystemExit(128 + number)
                return
            if relay.received:  # forwarded to a launcher that is gone
                raise SystemExit(128 + relay.last)
            if agent.is_welcome:
                deadline, is_lost = time.monotonic() + returns, True
            time.sleep(POLL_SECONDS)
    raise RunFailed(_not_found(run, world, returns if is_lost else seconds, is_lost=is_lost))


def _not_found(run: RunDir, world: JoinedWorld, seconds: float, *, is_lost: bool) -> str:
    who = f"process {world.process} of {world.size} on {socket.gethostname()}"
    if is_lost:
        return f"{who} lost the launcher, and it did not come back within {seconds:g} s"
    path = run.nodes / "meeting.json"
    return (
        f"{who} has waited {seconds:g} s (launch.start_seconds) for process 0, which launches: "
        f"nobody to connect to is named in {path}. Check that process 0 was started and reported "
        "no error, that this host sees its run directory, and that it can be reached from here"
    )


def _agent(run: RunDir, world: JoinedWorld) -> Agent | None:
    """Return an agent that is connected to the launcher; None if there is none yet."""
    meeting = read_meeting(run.nodes / "meeting.json")
    if meeting is None:
        return None
    try:
        key = read_key(run.nodes / Path(meeting.key).name)
        launcher = f"{','.join(meeting.reachable)}:{meeting.port}"
        connection = connect_once(launcher, key, CONNECT_SECONDS)
    except OSError:
        return None
    say_hello(connection, world.process)
    return Agent(run, connection, node_starter(world), JOINED_REQUESTS)


if __name__ == "__main__":
    main(sys.argv[1:], node_starter(require_world(os.environ)), JOINED_REQUESTS)
