"""A node agent: runs the ranks of one host for a launcher elsewhere, and ends with it.

    python -m mpctl.run.launch.node.agent RUN --connect HOST:PORT --key FILE [--seconds S] [--node I]

It connects to the launcher's control server (launch/control/), where both prove that they know the
key in the run directory, and tries for S seconds where something answers that does not prove
itself: the launcher closes connections while strangers open too many. It sends the facts of this
host and then obeys the launcher: start torchrun, end it, answer requests. It reports the state of
its ranks once a second, where there are many hosts less often (attempt.py), and at once when their
phase has changed: all have joined, one has failed, torchrun has ended. When the connection closes,
when nothing is heard for `launch.silence_seconds` or when a signal asks it to end, it ends its
ranks and exits; when it is killed, the kernel kills torchrun and the ranks with it.

Each request (REQUESTS) is one function that is called in a thread, so that pings and reports
continue meanwhile.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

from mpctl.core.durable import wait_for_file
from mpctl.records.rundir.directory import RunDir
from mpctl.run.hosts.machine import NO_RUN_DIR, host_facts
from mpctl.run.hosts.modules import run_module
from mpctl.run.hosts.network import any_free_port, socket_interfaces
from mpctl.run.launch.attempt import AttemptPhase, NodeState
from mpctl.run.launch.control.messages import (
    Connection,
    FromLauncher,
    Hello,
    Pong,
    Report,
    Request,
    Result,
    Start,
    Unproved,
    read_key,
)
from mpctl.run.launch.node.processes import HostRanks
from mpctl.run.launch.node.torchrun import RANK_VARIABLES, NodeStart, NodeTorchrun, SpareTorchrun

POLL_SECONDS, CONNECT_SECONDS = 0.05, 20.0
PROVE_SECONDS, KEY_SECONDS = 5.0, 5.0
"""Time limits for a peer to prove itself, and for a network file system to show the key."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Pause before a launcher that did not prove itself is tried again; twice as long each time."""
ANSWERS = (Unproved, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
"""Errors that end a handshake with a peer that is there."""
SSH_CLIENT = "@ssh"
"""Address in `--connect` from which sshd saw this login come (SSH_CONNECTION)."""
Requests = Mapping[str, Callable[..., Any]]
REQUESTS: Requests = {"free_port": any_free_port, "run_module": run_module}
"""The requests by name; arguments and results are JSON."""


NodeStarter = Callable[[RunDir, NodeStart], HostRanks]
"""Starts the ranks of an agent. Raises OSError when it cannot."""


class Agent:
    """The agent of one host. connection: to the launcher; starter: starts its ranks, by torchrun
    when None; requests: functions that the launcher may call, by name; attempt: the number of the
    attempt whose ranks run, or ran last; is_welcome: whether the launcher has answered; is_over:
    whether it has said that the launch is over."""

    def __init__(
        self, run: RunDir, connection: Connection, starter: NodeStarter | None = None, requests: Requests = REQUESTS
    ) -> None:
        self.run, self.connection, self.spare = run, connection, SpareTorchrun()
        self.starter = starter or partial(NodeTorchrun, spare=self.spare)
        self.requests: Requests = {**requests, "stacks": lambda: self.node.stacks() if self.node else {}}
        self.attempt = 0
        self.is_welcome = False
        self.node: HostRanks | None = None
        self.reported: NodeState | None = None
        self.heard = self.next_report = time.monotonic()
        self.is_over = False
        self.results: SimpleQueue[Result] = SimpleQueue()

    def serve(self) -> None:
        """Obey the launcher until the launch is over or the connection is lost."""
        try:
            while not self.is_over and self.connection.is_open:
                for message in self.connection.receive(POLL_SECONDS):
                    self.heard, self.is_welcome = time.monotonic(), True
                    self._obey(message)
                silence = self.connection.terms.silence
                if time.monotonic() - self.heard > silence:
                    told = f"the launcher was silent for {silence:g} s (launch.silence_seconds)"
                    print(told, file=sys.stderr)
                    break
                while not self.results.empty():
                    self.connection.send(self.results.get())
                self._report_if_due()
        finally:
            if self.node is not None:
                self.node.end()
            self.spare.end()

    def _obey(self, message: FromLauncher) -> None:
        if isinstance(message, Start):
            self._start(message)
        elif isinstance(message, Request):
            answer = threading.Thread(target=self._answer, args=(message,), daemon=True)
            answer.start()
        elif message.type == "ping":
            self.connection.send(Pong())
        elif message.type == "end" and self.node is not None:
            self._send(self.node.end())
        elif message.type == "stop" and self.node is not None:
            self.node.request_stop()
        elif message.type == "bye":
            self.is_over = True

    def _answer(self, request: Request) -> None:
        """Answer a request, in a thread; an exception is sent as the answer and ends no rank."""
        number, function = request.number, self.requests.get(request.name)
        if function is None:
            self.results.put(Result(number, error=f"unknown request {request.name!r}"))
            return
        try:
            result = Result(number, function(**request.arguments))
        except Exception as error:
            result = Result(number, error=f"{type(error).__name__}: {error}")
        self.results.put(result)

    def _start(self, message: Start) -> None:
        """Start torchrun; a failure to start is reported as exit code 1."""
        if self.node is not None:
            self.node.end()
        self.attempt, self.node, self.reported = message.attempt, None, None
        start, problem = message.start, ""
        if foreign := start.env.keys() - RANK_VARIABLES:
            problem = f"no launcher sets {', '.join(sorted(foreign))}"
        else:
            env = {**socket_interfaces(start.address, os.environ), **start.env}
            try:
                self.node = self.starter(self.run, replace(start, env=env))
            except OSError as error:
                problem = f"ranks could not be started: {error}"
        if problem:
            print(problem, file=sys.stderr)
            self._send(NodeState(node=start.node, host=socket.gethostname(), code=1))

    def _report_if_due(self) -> None:
        """Report when the launcher expects one, or when something has ended since."""
        if self.node is None or (self.reported and self.reported.code is not None):
            return
        before = AttemptPhase.STARTING if self.reported is None else self.reported.phase
        if time.monotonic() >= self.next_report or self.node.poll() is not before:
            self._send(self.node.snapshot())

    def _send(self, state: NodeState) -> None:
        self.reported = state
        self.next_report = time.monotonic() + self.connection.terms.report_seconds
        self.connection.send(Report(self.attempt, state))


def connect(addresses: str, key: bytes, seconds: float = CONNECT_SECONDS) -> Connection:
    """A connection to the launcher at ADDRESS[,ADDRESS...]:PORT, as `connect_once` finds it. Tries
    again, with pauses, for `seconds` where something answers at one of them; where nothing does,
    for at most CONNECT_SECONDS. Raises OSError when it finds none, at once where all refuse: a
    launcher listens before it starts agents, so this one has ended."""
    _parse(addresses)
    begin, pause = time.monotonic(), FIRST_PAUSE
    while True:
        try:
            return connect_once(addresses, key, min(seconds, CONNECT_SECONDS))
        except ConnectionRefusedError:
            raise
        except OSError as error:
            is_answered = isinstance(error, Unproved)
            patience = seconds if is_answered else min(seconds, CONNECT_SECONDS)
            if time.monotonic() + pause > begin + patience:
                raise
        # By chance, so that a thousand agents that were turned away do not come back together.
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, LONGEST_PAUSE)


def connect_once(addresses: str, key: bytes, seconds: float) -> Connection:
    """A connection to the launcher at ADDRESS[,ADDRESS...]:PORT, the first where the peer proves to
    be the launcher; each gets an equal part of the time. The address @ssh is that of the host from
    which ssh logged in here. Raises Unproved when one answered, ConnectionRefusedError when all
    refused, another OSError otherwise."""
    known, port = _parse(addresses)
    reasons, errors = list[str](), list[OSError]()
    for address in known:
        try:
            return _prove(address, port, key, seconds / len(known))
        except OSError as error:
            errors.append(error)
            reasons.append(f"{address} port {port}: {error.strerror or error}")
    text = "; ".join(reasons)
    if any(isinstance(error, ANSWERS) for error in errors):
        raise Unproved(text)
    if all(isinstance(error, ConnectionRefusedError) for error in errors):
        raise ConnectionRefusedError(text)
    raise OSError(text)


def _parse(addresses: str) -> tuple[list[str], int]:
    """The addresses and the port of a launcher. Raises OSError when no address is known."""
    names, _, port = addresses.rpartition(":")
    login = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
    known = [login if name == SSH_CLIENT else name.strip("[]") for name in names.split(",")]
    if not any(known):
        raise OSError("no address is known")
    return list(dict.fromkeys(filter(None, known))), int(port)


def _prove(address: str, port: int, key: bytes, seconds: float) -> Connection:
    opened = socket.create_connection((address, port), timeout=seconds)
    try:
        return Connection.prove(opened, key, PROVE_SECONDS)
    except OSError:
        opened.close()
        raise


def wait_for_key(path: Path) -> bytes:
    """The key of the launch, once the file system shows its file. Raises OSError when it does not
    within KEY_SECONDS."""

    def find() -> bytes | None:
        with suppress(OSError):
            return read_key(path)
        return None

    return wait_for_file(find, path.parent, KEY_SECONDS) or read_key(path)


def known_name() -> str:
    """The name by which the launcher knows this host."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def say_hello(connection: Connection, node: int | None) -> None:
    """Send the first message."""
    local, remote = connection.socket.getsockname()[0], connection.socket.getpeername()[0]
    connection.send(Hello(known_name(), host_facts(), node, local, remote))


def serve_launcher(
    make_agent: Callable[[Connection], Agent], addresses: str, key: bytes, seconds: float, node: int | None
) -> None:
    """Serve a launcher until the launch is over or the connection is lost. One that closes the
    connection before it has answered the hello is tried again, for `seconds` in all: this end has
    proved itself once it has sent its proof, the launcher may not have read it. Raises OSError when
    there is none."""
    deadline = time.monotonic() + seconds
    while True:
        connection = connect(addresses, key, max(1.0, deadline - time.monotonic()))
        agent = make_agent(connection)
        try:
            say_hello(connection, node)
        except OSError:  # closed since it was proved
            if time.monotonic() > deadline:
                raise
        else:
            agent.serve()
            if agent.is_welcome or time.monotonic() > deadline:
                return
        connection.socket.close()
        time.sleep(FIRST_PAUSE)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str], starter: NodeStarter | None = None, requests: Requests = REQUESTS) -> None:
    """Serve one launcher; exits with code 1 and a line on stderr when it cannot be reached.

    starter: starts the ranks of this host, by torchrun when None; requests: what it answers, by
    name."""
    parser = argparse.ArgumentParser(prog="mpctl.run.launch.node.agent")
    parser.add_argument("run", type=Path)
    parser.add_argument("--connect", required=True)
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=CONNECT_SECONDS)
    parser.add_argument("--node", type=int)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    for ignored in (signal.SIGINT, signal.SIGUSR1):  # handled by the launcher
        signal.signal(ignored, signal.SIG_IGN)
    try:
        key = wait_for_key(options.key)
    except OSError as error:
        sys.exit(f"{known_name()} {NO_RUN_DIR}: {error}")
    agent = partial(Agent, RunDir(options.run), starter=starter, requests=requests)
    try:
        serve_launcher(agent, options.connect, key, options.seconds, options.node)
    except OSError as error:
        sys.exit(f"the launcher cannot be reached: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
