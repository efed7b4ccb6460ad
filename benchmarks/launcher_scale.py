"""What a launch over many hosts costs the launcher:
`python -m benchmarks.launcher_scale [HOSTS]`. A benchmark, not a test;
tests/run/launch/control/test_scale.py holds the bytes of a host.

HOSTS node agents (1,000) of 8 ranks each connect to a control server. They are sockets of one other
process that speak the protocol: they answer pings and report as often as the launcher asks for it,
ranks that train (tp 8, pp 8, the rest dp) with logs of their collectives and last steps. The
launcher does for an attempt what run_launch does at each poll: phase, status.json, hangs, saves,
stragglers.

Processor time of the launcher's process, in seconds a second (cores), for each part alone and for
all: other load of the machine makes it slower, not much dearer.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import resource
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mpctl.cli.entry import COLLECTIONS
from mpctl.run.hosts.machine import host_facts
from mpctl.run.launch.attempt import report_seconds
from mpctl.run.launch.control.cluster import AgentAttempt
from mpctl.run.launch.control.messages import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    FROM_LAUNCHER,
    HEAD,
    Handshake,
    Hello,
    Pong,
    Report,
    Result,
    Welcome,
    encode,
    parse_head,
)
from mpctl.run.launch.control.server import ControlServer
from mpctl.run.launch.slow_parts import RANKS_PER_SECOND, SlowPartsMonitor
from mpctl.run.launch.status_file import StatusFile, read_status
from mpctl.run.launch.supervise import POLL_SECONDS, SaveMonitor, WatchedAttempt
from mpctl.run.launch.watch import RunWatch
from mpctl.spec.launch import LaunchSpec
from mpctl.spec.load import load_job
from tests.run.launch.control.training_hosts import RANKS, STAGES, node_state

SECONDS, REPORTED_SECONDS = 10.0, 120.0
"""The least of a measurement; in which all hosts must have reported before it."""
CONNECT_SECONDS, AGAIN_SECONDS = 0.005, 0.5
"""Between two agents that connect: as a thousand do by ssh, not all in one moment; and before one
comes again that a launcher without processor time has turned away."""


async def _agent(hello: Hello, body: bytes, share: float, port: int, key: bytes) -> None:
    """One agent. body: of its reports; share: at which part of a period it sends them."""
    while not await _visit(hello, body, share, port, key):
        await asyncio.sleep(AGAIN_SECONDS)


async def _visit(hello: Hello, body: bytes, share: float, port: int, key: bytes) -> bool:
    """One connection of an agent, to its end; whether it was welcome."""
    try:
        reader, writer, handshake = await _prove(port, key)
    except (OSError, EOFError):
        return False
    sealing, opening = handshake.messages_of("agent"), handshake.messages_of("launcher")
    writer.write(sealing.seal(encode(hello)))

    async def report(seconds: float) -> None:
        await asyncio.sleep(seconds * share)
        while True:
            writer.write(sealing.seal(body))
            await asyncio.sleep(seconds)

    reporting: list[asyncio.Task[None]] = []
    with suppress(OSError, EOFError):
        while True:
            length, mac = parse_head(await reader.readexactly(HEAD.size))
            received = await reader.readexactly(length)
            opening.check(mac, received)
            message = FROM_LAUNCHER.validate_json(received)
            if isinstance(message, Welcome):
                reporting.append(asyncio.create_task(report(message.report_seconds)))
            elif message.type == "ping":
                writer.write(sealing.seal(encode(Pong())))
            elif message.type == "request":
                writer.write(sealing.seal(encode(Result(message.number, {}))))
            elif message.type == "bye":
                break
    for task in reporting:
        task.cancel()
    return bool(reporting)


async def _prove(port: int, key: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Handshake]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    writer.write(challenge)
    answer = await reader.readexactly(ANSWER_BYTES)
    handshake = Handshake(key, challenge, answer[:CHALLENGE_BYTES])
    handshake.require("launcher", answer[CHALLENGE_BYTES:])
    writer.write(handshake.proof("agent"))
    return reader, writer, handshake


def agents(hosts: int, port: int, key: bytes) -> None:
    """All agents, in this process, until the launcher sends them away."""
    raise_file_limit()

    facts = host_facts()
    hellos = [Hello(f"n{node}", facts, node, "127.0.0.1", "127.0.0.1") for node in range(hosts)]
    bodies = [encode(Report(1, node_state(node, hosts))) for node in range(hosts)]

    async def run() -> None:
        tasks = []
        for node, (hello, body) in enumerate(zip(hellos, bodies, strict=True)):
            one = _agent(hello, body, node / hosts, port, key)
            tasks.append(asyncio.create_task(one))
            await asyncio.sleep(CONNECT_SECONDS)
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def raise_file_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@dataclass
class Cost:
    """Cores that something took. each: seconds of processor time of one call."""

    name: str
    cores: float
    each: float | None = None


def cost(name: str, call: Callable[[], object], every: float) -> Cost:
    """What a call takes that is made every so many seconds: the least of three."""
    taken = []
    for _ in range(3):
        begin = time.thread_time()
        call()
        taken.append(time.thread_time() - begin)
    return Cost(name, min(taken) / every, min(taken))


def measure(hosts: int, folder: Path) -> tuple[list[Cost], int, float]:
    """The costs of parts and of all, the bytes of status.json, and the polls a second."""
    raise_file_limit()
    gc.set_threshold(*COLLECTIONS)  # as the command `mpctl` does
    server = ControlServer([f"n{node}" for node in range(hosts)], silence=3600)
    server.open(["127.0.0.1"])
    context = multiprocessing.get_context("spawn")
    others = context.Process(target=agents, args=(hosts, server.port, server.key))
    others.start()
    try:
        deadline = time.monotonic() + REPORTED_SECONDS
        while (reported := sum(1 in link.reports for link in server.links)) < hosts:
            if time.monotonic() > deadline:
                sys.exit(f"{reported} of {hosts} hosts reported within {REPORTED_SECONDS:g} s")
            time.sleep(0.1)
        used, begin = time.process_time(), time.monotonic()
        time.sleep(SECONDS)
        reading = (time.process_time() - used) / (time.monotonic() - begin)
        attempt = AgentAttempt(server, server.links, 1, "127.0.0.1:1", dict)
        world, stages = hosts * RANKS, STAGES if hosts % STAGES == 0 else 1
        period = report_seconds(hosts)
        watched = WatchedAttempt(attempt, StatusFile(folder / "status.json"))
        watch = RunWatch(LaunchSpec(), world, address="127.0.0.1:1", period=period)
        saves = SaveMonitor(print)
        job = load_job(
            "demo",
            {"cluster.nodes": hosts, "cluster.gpus_per_node": RANKS, "parallel.tp": RANKS, "parallel.pp": stages},
        )
        slow = SlowPartsMonitor(job, folder / "slow.jsonl", lambda parts, words: None)
        compared_every = max(1.0, world / RANKS_PER_SECOND)
        slow.check(attempt.snapshot())  # the first time of each is dearer
        seconds = max(SECONDS, 2 * compared_every)
        polls, used, begin = 0, time.process_time(), time.monotonic()
        while time.monotonic() < begin + seconds:
            watched.poll()
            watch.is_healthy(attempt)
            saves.poll(attempt)
            slow.poll(attempt)
            time.sleep(POLL_SECONDS)
            polls += 1
        seconds = time.monotonic() - begin
        all_of_it = (time.process_time() - used) / seconds
        state = attempt.snapshot()

        def write() -> None:
            watched.status.write(state, watched.phase)

        write()
        pause = watched.status.next_write - time.monotonic()
        costs = [
            Cost(f"reports of {hosts:,} hosts every {period:g} s, pings", reading),
            cost("phase, 20 times a second", attempt.poll, POLL_SECONDS),
            cost("hangs", lambda: watch.check(attempt.snapshot()), period),
            cost("saves, twice a second", lambda: attempt.snapshot().doing(), 0.5),
            cost("stragglers and slow links", lambda: slow.check(attempt.snapshot()), compared_every),
            cost(f"status.json, every {pause:.1f} s", write, pause),
            Cost("all of it", all_of_it),
        ]
        begin = time.monotonic()
        assert read_status(watched.status.path) is not None
        costs.append(Cost("`mpctl status` reads the file in", 0.0, time.monotonic() - begin))
        return costs, watched.status.path.stat().st_size, polls / seconds
    finally:
        server.close()
        others.join(10)
        others.kill()


def main(arguments: Sequence[str]) -> None:
    hosts = int(arguments[0]) if arguments else 1000
    with tempfile.TemporaryDirectory() as folder:
        costs, size, polls = measure(hosts, Path(folder))
    for row in costs:
        each = "" if row.each is None else f"{row.each * 1e3:8.1f} ms"
        print(f"{row.name:55} {row.cores:6.3f} {each}")
    print(f"status.json {size / 1e6:.2f} MB; {polls:.1f} polls/s; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
