"""What the law of goodput (mpctl/plan/estimate/goodput.py) is held against, in tests and by
`python -m benchmarks.goodput`: a simulated run that fails, saves and is restarted, and shares of
useful time that were published.

The simulation walks through a run event by event: work, the pause of a save, the write behind it,
failures at any moment (also within a save and a restart; a second one during a detection changes
nothing), and nodes that are away for repair. It shares no formula with the law.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from mpctl.plan.estimate.goodput import Failures, SaveCost, best_interval, job_mtbf, time_shares

HOUR = 3600.0
SIZES = tuple(8 << (2 * power) for power in range(8))  # 8 to 131,072 GPUs
GPU_MTBF, NODE_MTBF, REPAIR = 79_000 * HOUR, 17_600 * HOUR, 24 * HOUR
STORAGE = 83e6  # bytes/s for each GPU
DAY = 24 * HOUR
MODELS = ((64, 8e9), (2_048, 70e9), (1 << 20, 405e9))  # up to so many GPUs, so many parameters
WIDTH = 12  # bytes of a parameter in a checkpoint


@dataclass(frozen=True)
class Published:
    """A published share of useful time, between `low` and `high`, and the figures from which the
    law has to say it. interval: seconds of work between saves, the best when None."""

    run: str
    source: str
    published: str
    low: float
    high: float
    failures: Failures
    save: SaveCost
    interval: float | None = None

    @property
    def useful(self) -> float:
        """The share that the law says."""
        interval = self.interval or best_interval(self.save, self.failures.mtbf)
        return time_shares(self.failures, self.save, interval).useful


def _nodes(gpus: int, per_thousand: float) -> float:
    """Seconds between failures, from failures in a thousand days of a node of 8 GPUs."""
    return DAY / (gpus / 8 * per_thousand / 1000)


META = "arXiv 2410.21680"
# Pauses and writes of a 405B model: ByteCheckpoint (arXiv 2407.20143, table 8): 0.59 s, 51 s.
PUBLISHED = (
    Published(
        "Llama 3 405B, 16,384 H100",
        "arXiv 2407.21783, section 3.3.4: 466 interruptions in 54 days; storage of 2 TB/s",
        "above 90 %",
        0.9,
        1.0,
        Failures(54 * DAY / 466, 23.0, 303.0),
        SaveCost(0.59, 3.0),
    ),
    Published(
        "MegaScale, 12,288 A100",
        "arXiv 2402.15627, section 6.3: over 100 restarts in "
        "several weeks (4 taken), found within 10 min, caught up within 15",
        "above 90 %",
        0.9,
        1.0,
        Failures(28 * DAY / 100, 600.0, 600.0),
        SaveCost(0.59),
        600.0,
    ),
    Published(
        "ByteRobust, 9,600 GPUs",
        "arXiv 2509.16293: three months; failover of 10 min and more; rate of Llama 3's cluster",
        "97 %",
        0.955,
        0.985,
        Failures(_nodes(9_600, 3.79), 0.0, 600.0),
        SaveCost(0.59, 51.0),
    ),
    Published(
        "RSC-1, jobs of 2,048 to 4,096 A100",
        f"{META}: 6.50 failures in 1,000 node days, saved every hour, 5 to 20 min to restart",
        "above 0.9",
        0.9,
        1.0,
        Failures(_nodes(3_072, 6.5), 0.0, 750.0),
        SaveCost(0.0),
        HOUR,
    ),
    Published(
        "RSC-1, 12,000 A100, saves of 10 s",
        f"{META}, projected",
        "0.9",
        0.88,
        0.93,
        Failures(_nodes(12_000, 6.5), 0.0, 300.0),
        SaveCost(10.0),
    ),
    Published(
        "RSC-1, 12,000 A100, saves of 5 min",
        f"{META}, projected",
        "below 0.9",
        0.0,
        0.9,
        Failures(_nodes(12_000, 6.5), 0.0, 300.0),
        SaveCost(300.0),
    ),
    Published(
        "the same at 1 failure in 1,000 node days",
        f"{META}, projected",
        "0.9",
        0.87,
        0.93,
        Failures(_nodes(12_000, 1.0), 0.0, 300.0),
        SaveCost(300.0),
    ),
    Published(
        "100,000 GPUs at RSC-2's 2.34",
        f"{META}, projected: interval and restart of 2 min",
        "0.9",
        0.88,
        0.95,
        Failures(_nodes(100_000, 2.34), 0.0, 120.0),
        SaveCost(0.0),
        120.0,
    ),
    Published(
        "OPT-175B, 992 A100, restarted by people",
        "metaseq's chronicles: 33 days of work in 56, ~90 restarts, hours to replace a node (5 taken)",
        "59 %",
        0.55,
        0.65,
        Failures((56 * DAY - 90 * 5 * HOUR) / 90, 5 * HOUR, 0.0),
        SaveCost(30.0),
    ),
)


@dataclass(frozen=True)
class Simulated:
    """Shares of the time of a simulated run, its failures, and how many of them met no spare."""

    useful: float
    saves: float
    lost: float
    down: float
    failures: int
    without_spare: int


def simulate(
    failures: Failures,
    save: SaveCost,
    interval: float,
    *,
    count: int,
    seed: int = 1,
    spares: int = 0,
    repair: float = 0.0,
) -> Simulated:
    """A run until it has failed `count` times. spares, repair: each failing node is away for
    `repair` seconds; a failure that finds no spare is counted (the run goes on all the same)."""
    random = Random(seed)
    now = down = 0.0
    done = kept = 0.0  # seconds of work: of this attempt's state, and of the newest whole checkpoint
    pauses = kept_pauses = 0
    away: list[float] = []
    without = failed = 0
    while failed < count:
        fails_at = now + random.expovariate(1 / failures.mtbf)
        pending: tuple[float, float, int] | None = None  # whole at, work in it, pauses
        while now < fails_at:
            for phase in (interval, save.pause):
                end = now + phase
                if pending and pending[0] <= min(end, fails_at):
                    _, kept, kept_pauses = pending
                    pending = None
                now = min(end, fails_at)
                if now < end:
                    break
            else:
                done, pauses = done + interval, pauses + 1
                pending = (now + save.write, done, pauses)
        done, pauses = kept, kept_pauses
        started = now
        while True:
            failed += 1
            while away and away[0] <= now:
                heapq.heappop(away)
            without += len(away) >= spares
            if repair:
                heapq.heappush(away, now + repair)
            now += failures.detect
            fails_at = now + random.expovariate(1 / failures.mtbf)
            if fails_at >= now + failures.restart:
                now += failures.restart
                break
            now = fails_at
        down += now - started
    saves = kept_pauses * save.pause
    return Simulated(kept / now, saves / now, (now - kept - saves - down) / now, down / now, failed, without)


def case(gpus: int) -> tuple[Failures, SaveCost]:
    """A run of typical size on so many GPUs: 8B, 70B or 405B parameters, saved in the background,
    restarted 300 s after the failure is noticed, with the rates of Llama 3's cluster."""
    size = WIDTH * next(parameters for most, parameters in MODELS if gpus <= most)
    write = size / (STORAGE * gpus)
    mtbf = job_mtbf(gpus, -(-gpus // 8), GPU_MTBF, NODE_MTBF)
    return Failures(mtbf, 23.0, 300.0 + write), SaveCost(0.5 + size / gpus / 25e9, write)


def simulate_elastic(
    failures: Failures,
    save: SaveCost,
    interval: float,
    *,
    nodes: int,
    repair: float,
    capacity: Callable[[int], float],
    count: int,
    seed: int = 1,
) -> float:
    """What an elastic run without spares computes of the work of all its nodes, until it has failed
    `count` times. Nodes that are away do not fail; after `repair` seconds one is back: the run
    saves and starts again with it. A save is whole at its end."""
    random = Random(seed)
    now = done = kept = 0.0
    away: list[float] = []
    failed = 0

    def next_failure() -> float:
        there = (nodes - len(away)) / nodes
        return now + random.expovariate(there / failures.mtbf) if there else float("inf")

    while failed < count:
        fails_at, speed = next_failure(), capacity(len(away))
        returns_at = away[0] if away else float("inf")
        left = interval
        while True:
            saved_at = now + left / speed if speed else float("inf")
            event = min(fails_at, returns_at, saved_at)
            done += (event - now) * speed
            now = event
            if event < saved_at:
                break
            if fails_at < now + save.pause:
                now = event = fails_at
                break
            now, kept, left = now + save.pause, done, interval
            returns_at = max(returns_at, now)
        is_planned = event == returns_at and event != fails_at
        if is_planned:
            heapq.heappop(away)
            now, kept = now + save.pause, done
        while True:
            if not is_planned:
                failed += 1
                done = kept
                heapq.heappush(away, now + repair)
                now += failures.detect
            ends, fails_at = now + failures.restart, next_failure()
            while away and away[0] <= ends:  # back in time for this start
                heapq.heappop(away)
            if fails_at >= ends:
                now = ends
                break
            now, is_planned = fails_at, False
    return kept / now
