"""Seconds in collectives: a rank's own work does not count, waiting for a late peer does."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from mpctl.train.transport.group import Group
from mpctl.train.transport.streams import HOST_STREAM, side_stream
from mpctl.train.transport.timing import MANY_PENDING, Collective, SecondsByAxis, StreamSecondsByAxis, timed_start
from tests.ranks import grouped, run_ranks
from tests.train.transport.shared_ranks import sharing

LATE = 0.2
AN_ALL_REDUCE = Collective("all_reduce", "dp", 8, "float32")


class Ticks(SecondsByAxis):
    """A timer whose clock is set by hand. told: (kind, began, ended, started)."""

    def __init__(self) -> None:
        super().__init__()
        self.tick, self.told = 0, list[tuple[str, int, int, int | None]]()

    def now(self) -> int:
        return self.tick

    def spent(self, collective: Collective, began: int, started: int | None = None) -> None:
        self.told.append((collective.kind, began, self.tick, started))


class ThreeTicks:
    """Work that takes three ticks from when it is waited for."""

    def __init__(self, clock: Ticks) -> None:
        self.clock = clock

    def wait(self) -> None:
        self.clock.tick += 3


def test_what_travels_while_the_rank_computes_is_not_counted() -> None:
    clock = Ticks()

    def start() -> ThreeTicks:
        clock.tick += 1
        return ThreeTicks(clock)

    clock.tick = 10
    work = timed_start(start, clock, AN_ALL_REDUCE)
    assert work is not None
    clock.tick += 50  # computes
    work.wait()
    assert clock.told == [("all_reduce", 10, 11, None), ("all_reduce", 61, 64, 10)]
    assert isinstance(timed_start(start, None, AN_ALL_REDUCE), ThreeTicks)


def test_seconds_add_up_by_axis_until_they_are_cleared() -> None:
    seconds = SecondsByAxis()
    for axis, length in (("tp", 1.0), ("dp", 2.0), ("tp", 0.5)):
        seconds.add(axis, length)
    assert list(seconds.snapshot().items()) == [("dp", 2.0), ("tp", 1.5)]
    seconds.clear()
    assert seconds.snapshot() == {}


def _one_is_late(rank: int, size: int, way: str, kind: str) -> dict[str, Any]:
    """Rank 1 comes late; both compute between start and wait."""
    made, timer = (sharing if way == "memory" else grouped)(rank, size), SecondsByAxis()
    group = Group(rank, size, made.process_group, "dp", shared=made.shared, timer=timer)
    group.all_reduce(torch.ones(4))
    timer.clear()
    began = time.perf_counter()
    time.sleep(LATE * rank)
    if kind == "send" and rank == 1:
        pending = group.start_send(torch.ones(9), 0)
    elif kind == "send":
        pending = group.start_receive(torch.zeros(9), 1)
    else:
        pending = group.start_all_reduce(torch.ones(9))
    time.sleep(LATE / 4)
    pending.wait()
    return {"all": time.perf_counter() - began, "seconds": timer.snapshot()}


@pytest.mark.parametrize(("way", "kind"), [("gloo", "all_reduce"), ("memory", "all_reduce"), ("gloo", "send")])
def test_a_rank_waits_for_a_late_peer_and_not_for_itself(way: str, kind: str) -> None:
    early, late = run_ranks(_one_is_late, 2, way, kind)
    assert list(early["seconds"]) == list(late["seconds"]) == ["dp"]
    assert early["seconds"]["dp"] > LATE / 4  # bounds of the rank's own clock, not of its speed
    assert early["seconds"]["dp"] <= early["all"] - LATE / 4
    assert late["seconds"]["dp"] <= late["all"] - LATE * 5 / 4


def test_a_group_of_one_rank_spends_nothing() -> None:
    timer = SecondsByAxis()
    Group(timer=timer).all_reduce(torch.ones(3))
    assert timer.snapshot() == {}


@dataclass
class Stream:
    """A device's stream by hand: events that were recorded on it pass when `run` is called."""

    tick: int = 0
    waiting: list[StreamEvent] = field(default_factory=list)
    made: int = 0

    def event(self) -> StreamEvent:
        self.made += 1
        return StreamEvent(self)

    def run(self, milliseconds: int) -> None:
        """Everything recorded so far passes, each event so much later than the one before."""
        for event in self.waiting:
            self.tick += milliseconds
            event.passed = self.tick
        self.waiting.clear()


@dataclass(eq=False)
class StreamEvent:
    stream: Stream
    passed: int | None = None

    def record(self) -> None:
        self.passed = None
        self.stream.waiting.append(self)

    def query(self) -> bool:
        return self.passed is not None

    def elapsed_time(self, later: StreamEvent) -> float:
        assert self.passed is not None and later.passed is not None
        return float(later.passed - self.passed)


def test_events_are_read_when_the_stream_has_passed_them_and_used_again() -> None:
    """A stream on which each event passes 3 ms after the one before."""
    stream = Stream()
    timer = StreamSecondsByAxis(stream.event)
    timer.spent(AN_ALL_REDUCE, timer.now())
    assert timer.snapshot() == {}  # not passed: nobody waits
    stream.run(3)
    timer.spent(AN_ALL_REDUCE, timer.now())
    assert timer.snapshot() == {"dp": 0.003}
    timer.clear()
    stream.run(3)
    assert timer.snapshot() == {"dp": 0.003}  # counts to what follows
    made = stream.made
    for _ in range(2 * MANY_PENDING):
        timer.spent(AN_ALL_REDUCE, timer.now())
        stream.run(1)
    assert stream.made - made <= 2 * MANY_PENDING
    assert timer.snapshot()["dp"] == pytest.approx(0.003 + 2 * MANY_PENDING / 1e3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_a_wait_is_what_the_stream_stands_still() -> None:
    """A kernel of 20 million cycles that the current stream waits for; the host does not."""
    timer, other = StreamSecondsByAxis(), torch.cuda.Stream()

    class Slept:
        def wait(self) -> None:
            torch.cuda.current_stream().wait_stream(other)

    def start() -> Slept:
        with torch.cuda.stream(other):
            torch.cuda._sleep(20_000_000)
        return Slept()

    work = timed_start(start, timer, AN_ALL_REDUCE)
    assert work is not None
    work.wait()
    torch.cuda.synchronize()
    seconds = timer.snapshot()["dp"]
    assert 20e6 / 4e9 < seconds < 20e6 / 0.2e9  # at 4 GHz, at 0.2 GHz


def test_a_cpu_and_a_rehearsal_have_the_host_s_stream():
    for device in ("cpu", "meta"):
        assert side_stream(torch.device(device), is_urgent=True) is HOST_STREAM
    x = torch.ones(2)
    HOST_STREAM.follow(HOST_STREAM.here())
    with HOST_STREAM.running():
        x.add_(1)
    HOST_STREAM.mark().synchronize()
    HOST_STREAM.join(HOST_STREAM.mark())
    assert x.tolist() == [2, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_stream_of_cuda_goes_beside_the_current_one():
    """Memory of the current stream is used on the other and held until that is joined: many times,
    so that it is handed out again, while the host waits for nothing."""
    device = torch.device("cuda", 0)
    stream = side_stream(device, is_urgent=True)
    torch.cuda.empty_cache()
    before, size = torch.cuda.memory_reserved(device), 1 << 22
    torch.cuda.reset_peak_memory_stats(device)
    held, sums = deque(), []
    for number in range(200):
        x = torch.full((size // 4,), float(number), device=device)
        y = torch.empty_like(x)
        stream.follow()
        with stream.running():
            torch.add(x, 1, out=y)
        held.append((x, y, stream.mark()))
        del x, y
        if len(held) > 2:
            stream.join(held[0][-1])
            sums.append(held.popleft()[1].double().mean())
    assert [float(one) for one in sums] == [number + 1 for number in range(198)]
    assert torch.cuda.max_memory_reserved(device) - before <= 16 * size
