"""How much of a long run is useful: failures, saves, restarts, and the interval between saves.

A job fails as a Poisson process of mean M between failures (`job_mtbf`): rates of its GPUs and of
its nodes add up. It saves after every tau seconds of work and stops for delta while it does; the
checkpoint is whole w seconds later (0 where training waits for it; below tau + delta). A failure is
noticed after D, then the job is started again, R with the reading of the checkpoint, and goes on
from the newest whole one. Failures during a save and during a restart cost another D and R.

Memoryless failures make every attempt a renewal, so that the seconds of an interval are exact
(Daly, Future Generation Computer Systems 22, 2006, with D and w added):

    E = (M + D) exp((R + w) / M) (exp((tau + delta) / M) - 1)

The shares of the time: tau / E useful, delta / E saves, 1 - M / ((M + D) exp(R / M)) down, and the
rest work that is done again. Neither D, R nor w moves the tau that is best, which solves
(1 - x) exp(x + delta / M) = 1 for x = tau / M. Young's sqrt(2 delta M) (Communications of the ACM
17, 1974) and Daly's expansion (`young_interval`, `daly_interval`) are its first terms.

By hand, M = 10,000 s, delta = 5 s, D + R = 300 s: Young's interval is sqrt(100,000) = 316 s; saves
cost 5 / 316 = 1.6 %, work done again 158 / 10,000 = 1.6 %, restarts 3 %.

The law needs no small numbers, but a Poisson process: failures that come in bursts, or a node that
fails again and again, leave longer times without any. The sum of small costs that is used by hand
(`first_order`; Meta's, arXiv 2410.21680, is alike) says 1 % of the time too little where the
interval is a tenth of M, 2 % at a third, 12 % at M (docs/goodput.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, exp, expm1, inf, log1p, sqrt

HIGHEST_EXPONENT = 500.0  # of exp: beyond it no interval is ever finished
MANY = 400.0  # nodes in repair, from which on their number is taken as normally distributed


@dataclass(frozen=True)
class Failures:
    """How often a job is interrupted, and what that costs; all in seconds.

    mtbf: mean time between failures of the whole job, inf for none. detect: until a failure is
    noticed. restart: from then until the first step, with the reading of a checkpoint.
    """

    mtbf: float
    detect: float
    restart: float


@dataclass(frozen=True)
class SaveCost:
    """Cost of a checkpoint, in seconds. pause: training stops. write: from the end of the pause until
    the checkpoint is complete, while training goes on; 0 if training waits for it."""

    pause: float
    write: float = 0.0


@dataclass(frozen=True)
class TimeShares:
    """Shares of a run's time; the four add up to 1. lost: work that is done again."""

    useful: float
    saves: float
    lost: float
    down: float


def job_mtbf(gpus: int, nodes: int, gpu_mtbf: float, node_mtbf: float) -> float:
    """The mean time between failures of a job, in the unit of the two: rates of GPUs and nodes add.

    >>> round(job_mtbf(16_384, 2_048, 79_000, 17_600), 2)  # hours
    3.09
    """
    rate = gpus / gpu_mtbf + nodes / node_mtbf
    return 1 / rate if rate else inf


def time_shares(failures: Failures, save: SaveCost, interval: float) -> TimeShares:
    """The shares of the time, at a save after every `interval` seconds of work.

    A save that is not whole before the next one begins would delay it; so the interval counts as at
    least `save.write - save.pause`. Where nothing is ever finished, useful is 0.
    """
    work = max(interval, save.write - save.pause)
    cycle = work + save.pause
    if failures.mtbf == inf:
        return TimeShares(work / cycle, save.pause / cycle, 0.0, 0.0)
    mean = failures.mtbf
    if (cycle + failures.restart + save.write) / mean > HIGHEST_EXPONENT:
        return TimeShares(0.0, 0.0, 0.0, 1.0)
    attempt = (mean + failures.detect) * exp(failures.restart / mean)
    seconds = attempt * exp(save.write / mean) * expm1(cycle / mean)
    up = mean / attempt
    return TimeShares(work / seconds, save.pause / seconds, max(0.0, up - cycle / seconds), 1.0 - up)


def first_order(failures: Failures, save: SaveCost, interval: float) -> float:
    """The useful share as a sum of small costs, for intervals far below the mean time to failure:
    (1 - (D + R + w + (tau + delta) / 2) / M) / (1 + delta / tau)."""
    cycle = interval + save.pause
    cost = failures.detect + failures.restart + save.write + cycle / 2
    return (1 - cost / failures.mtbf) * interval / cycle


def young_interval(pause: float, mtbf: float) -> float:
    """Young's interval of work between saves (1974)."""
    return sqrt(2 * pause * mtbf)


def daly_interval(pause: float, mtbf: float) -> float:
    """Daly's expansion of the best interval (2006); mtbf where a pause is half of it
    or more."""
    if pause >= 2 * mtbf:
        return mtbf
    part = pause / (2 * mtbf)
    return young_interval(pause, mtbf) * (1 + sqrt(part) / 3 + part / 9) - pause


def best_interval(save: SaveCost, mtbf: float) -> float:
    """Seconds of work between saves that leave the largest useful share; inf without failures.

    >>> round(best_interval(SaveCost(5.0), 10_000.0)), round(daly_interval(5.0, 10_000.0))
    (313, 313)
    """
    if mtbf == inf:
        return inf
    pause = save.pause / mtbf
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        rises = middle < 1 and middle + pause + log1p(-middle) > 0
        low, high = (middle, high) if rises else (low, middle)
    return max(low * mtbf, save.write - save.pause)


def spare_nodes(in_repair: float, chance: float = 0.99) -> int:
    """The fewest spare nodes so that, with this chance, one is there when a node fails.

    in_repair: nodes in repair on the average, failures a second x seconds of a repair. They are
    Poisson distributed whatever the length of a repair is (M/G/infinity), and a failing node meets
    the others as any observer does; it finds a spare where fewer are away than there are spares.

    >>> spare_nodes(7.8)  # 2,048 nodes, one failure in 3.09 h, repairs of 24 h
    16
    """
    if in_repair > MANY:
        from statistics import NormalDist  # 10 ms that few runs need

        normal = NormalDist(in_repair, sqrt(in_repair))
        return ceil(normal.inv_cdf(chance)) + 1
    below = term = exp(-in_repair)
    count = 0
    while below < chance:
        count += 1
        term *= in_repair / count
        below += term
    return count + 1 if in_repair else 0


def mean_capacity(in_repair: float, capacity: Callable[[int], float], nodes: int) -> float:
    """The mean of `capacity(nodes away)` where the nodes in repair are Poisson distributed: what an
    elastic run computes of what the whole one would. capacity: 1 with none away."""
    if in_repair > MANY:
        return capacity(min(nodes, round(in_repair)))
    term, seen, mean = exp(-in_repair), 0.0, 0.0
    for away in range(nodes + 1):
        mean += term * capacity(away)
        seen += term
        if away > in_repair and 1 - seen < 1e-9:
            break
        term *= in_repair / (away + 1)
    return mean


def elastic_share(shares: TimeShares, failures: Failures, capacity: float) -> float:
    """Return the work of an elastic run without spares, as a share of what all its nodes could do: the
    mean capacity in its useful time, less a restart for each repaired node that returns.

    shares: of a run with all nodes; capacity: from `mean_capacity`.
    """
    grown = (1 - shares.down) * failures.restart / failures.mtbf
    return shares.useful * capacity / (1 + grown)
