"""The shape of a run's step times: noise, warm-up, spikes, levels, drift.

All statistics are robust, as logs have outliers: medians, and NORMAL times the median absolute
deviation as the standard deviation. The noise is that of neighbouring lines' differences over the
square root of 2, so that no shift and no drift counts as noise.

A *spike* is a line longer than the median of its NEAR neighbours by FAR standard deviations and by
LEAST_SPIKE. Without warm-up and spikes, the lines are cut where two levels fit them best (the least
sum of squares). A cut counts if the levels differ by SURE standard errors and by LEAST_SHIFT, and
each side is cut again. One straight line that fits better than two levels is a *drift* instead.

By hand, 1.00 1.01 0.99 1.00 1.00 then 1.20 1.21 1.19 1.20 1.20: two levels of 1.00 and 1.20 s, and
none of these lines is a spike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import log, sqrt
from statistics import fmean, median
from typing import NamedTuple

from mpctl.interop.logs import NORMAL
from mpctl.records.rundir.summary import WARM_UP_STEPS

FAR, LEAST_SPIKE, NEAR = 5.0, 0.05, 5
"""Of a spike: standard deviations (as of an outlier, interop/logs.py), share of the step, neighbours
on each side."""
SURE, LEAST_SHIFT, LEAST_DRIFT = 6.0, 0.015, 0.03
"""Of a shift or a drift: standard errors, as the best of hundreds of cuts reaches 4 by chance, and
shares of the step; BLOOM's slow GPU was 5.7 %."""
APART = 10
"""Lines over which slow spells last."""
LEAST_NOISE = 0.002
"""Share of a step that is noise at least: logs print three or four digits."""
LEAST_LINES = 5
"""Lines of a level."""
MOST_WARM_UP = 0.2
"""Share of the lines that may be warm-up."""
CHOICE = 4.0
"""Squared standard deviations by which two levels must fit better than a line, for the choice of where
to cut."""
DEEPEST = 3
WIDE = 0.045
"""Noise that is more than the ordinary 1 to 3 %."""
QUICK = 0.1
"""Share of the lines that are at the best of a run whose lines vary so much."""
PERIODIC = 0.8
"""Share of the gaps between spikes that must be multiples of their median."""


class Point(NamedTuple):
    """A line: its step, seconds of a step, what came before it (`checkpoint`, `evaluation`, or
    nothing), and the number of its start."""

    step: int
    seconds: float
    after: str = ""
    start: int = 0


class Spike(NamedTuple):
    """A line that took longer than its neighbours, by so many seconds."""

    point: Point
    excess: float


class Level(NamedTuple):
    """Lines of about the same seconds, from one step to another."""

    first: int
    last: int
    seconds: float
    lines: int


class Drift(NamedTuple):
    """Seconds at the first and at the last step, by a straight line."""

    first: int
    last: int
    begin: float
    end: float

    @property
    def rise(self) -> float:
        """Share by which steps became longer."""
        return self.end / self.begin - 1


class Shape(NamedTuple):
    """The shape of a run. median: seconds of its steady lines; noise: standard deviation of one as a
    share of that, between neighbours; spread: about their levels. interval: steps from line to
    line. warm_up: the first lines, where they took longer. lines: without these.
    quick: of the fastest QUICK."""

    median: float
    noise: float
    spread: float
    interval: int
    lines: int
    warm_up: tuple[Point, ...]
    spikes: tuple[Spike, ...]
    levels: tuple[Level, ...]
    drift: Drift | None
    starts: int
    quick: float

    @property
    def is_wide(self) -> bool:
        """Whether lines vary more than ordinary ones."""
        return self.noise >= WIDE * (1 + 2 / sqrt(max(1, self.lines)))  # an estimate of few lines is unsure

    @property
    def base(self) -> float:
        """Seconds of a step at the run's best: its fastest level, before it drifted up, or its quickest
        lines where these vary much."""
        if self.is_wide:
            return self.quick
        if self.drift is not None:
            return min(self.drift.begin, self.drift.end)
        return min(level.seconds for level in self.levels)

    def bursts(self, after: str | None = None) -> list[Spike]:
        """Spikes, those in a row as their first; after: only those that came after this."""
        found = [s for s in self.spikes if after is None or s.point.after == after]
        return [
            spike
            for before, spike in zip([None, *found], found, strict=False)
            if before is None or not 0 < spike.point.step - before.point.step <= self.interval
        ]

    def cost(self, spikes: Sequence[Spike]) -> float:
        """Seconds that these spikes add to a step in the mean."""
        return sum(spike.excess for spike in spikes) / max(1, self.lines)

    def period(self, spikes: Sequence[Spike]) -> int | None:
        """Steps from one of these to the next; None where they are not periodic, or fewer than 3."""
        gaps = [b.point.step - a.point.step for a, b in pairwise(spikes)]
        gaps = [gap for gap in gaps if gap > 0]
        if len(gaps) < 2:
            return None
        usual = median_low(gaps)
        near = max(self.interval, 0.05 * usual)
        fitting = [gap for gap in gaps if abs(gap - usual * max(1, round(gap / usual))) <= near]
        if usual < 2 * self.interval or len(fitting) < PERIODIC * len(gaps):
            return None
        return usual


def median_low(values: Sequence[int]) -> int:
    """The lower of the two middle values."""
    return sorted(values)[(len(values) - 1) // 2]


def find_shape(points: Sequence[Point]) -> Shape:
    """The shape of the lines of a run, at least three."""
    warm = _warm_up(points)
    rest = list(points[warm:])
    starts = {point.start for point in rest}
    if len(starts) > 1:  # each start warms up again
        rest = [p for p, before in zip(rest, [rest[0], *rest], strict=False) if p.start == before.start]
    seconds = [point.seconds for point in rest]
    local = [median(seconds[max(0, n - NEAR) : n + NEAR + 1]) for n in range(len(seconds))]
    noise = _noise([s / at for s, at in zip(seconds, local, strict=True)])
    spikes = tuple(
        Spike(point, point.seconds - at)
        for point, at in zip(rest, local, strict=True)
        if point.seconds - at > at * max(FAR * noise, LEAST_SPIKE)
    )
    slow = {spike.point for spike in spikes}
    clean = [point for point in rest if point not in slow and not point.after] or rest
    usual = median(seconds)
    noise = _noise([point.seconds / usual for point in clean])
    levels, drift = _levels(clean, noise * _persistence(clean))
    interval = median_low([b.step - a.step for a, b in pairwise(rest) if b.step > a.step] or [1])
    middle = median(point.seconds for point in clean)
    slow_start = [p for p in points[:warm] if p.seconds > middle * (1 + max(FAR * noise, LEAST_SPIKE))]
    quick = sorted(point.seconds for point in clean)[int(QUICK * len(clean))]
    spread = _spread(clean, levels, drift)
    return Shape(
        middle, noise, spread, interval, len(rest), tuple(slow_start), spikes, levels, drift, len(starts), quick
    )


def _warm_up(points: Sequence[Point]) -> int:
    """How many of the first lines to leave out: WARM_UP_STEPS, and those after them that are far above
    the rest, if these are few."""
    least = min(WARM_UP_STEPS, max(0, len(points) - 3))
    rest = [point.seconds for point in points[len(points) // 3 :]]
    middle = median(rest)
    far = middle * (1 + max(FAR * _noise([s / middle for s in rest]), LEAST_SPIKE))
    slow = next((n for n, point in enumerate(points) if point.seconds <= far), len(points))
    return max(least, slow) if slow <= MOST_WARM_UP * len(points) else least


def _noise(values: Sequence[float]) -> float:
    """The standard deviation of a value, from the differences of neighbours."""
    steps = [abs(b - a) for a, b in pairwise(values)]
    return max(NORMAL * median(steps) / sqrt(2) if steps else 0.0, LEAST_NOISE)


def _persistence(clean: Sequence[Point]) -> float:
    """The standard error of a mean over that of independent lines with the noise of neighbours.

    A trend of the longest start is taken out first, or its two best levels, whichever leaves less: one of
    them is what is looked for. Where what is slow stays so for a while, lines far apart differ by more
    than neighbours. With a correlation r from line to line, neighbours have 1 - r of the variance, and the
    factor is sqrt(1 + r) / (1 - r): 1 for r = 0, 6.7 for r = 0.8.
    """
    own = _longest(clean)
    seconds = [point.seconds for point in own]
    slope, cut = _slope(own, seconds), _best_cut(seconds) or 0
    left, right = fmean(seconds[:cut] or [0.0]), fmean(seconds[cut:])
    levels = [value - (left if n < cut else right) for n, value in enumerate(seconds)]
    return min(_factor([point.seconds - slope * point.step for point in own]), _factor(levels))


def _factor(values: Sequence[float]) -> float:
    """The factor of _persistence for values without a trend."""
    near = [abs(b - a) for a, b in pairwise(values)]
    apart = [abs(b - a) for a, b in zip(values, values[APART:], strict=False)]
    if len(apart) < APART:
        return 1.0
    rest = min(1.0, (median(near) / (median(apart) or 1.0)) ** 2) or 1.0
    return sqrt(2 - rest) / rest


def _longest(clean: Sequence[Point]) -> list[Point]:
    """The lines of the start that has most."""
    counts = Counter(point.start for point in clean)
    start = max(counts, key=lambda number: counts[number])
    return [point for point in clean if point.start == start]


def _slope(points: Sequence[Point], values: Sequence[float]) -> float:
    """The least-squares slope of values over steps; 0 for a single step."""
    mean_x, mean_y = fmean(point.step for point in points), fmean(values)
    width = sum((point.step - mean_x) ** 2 for point in points)
    rise = sum((point.step - mean_x) * (value - mean_y) for point, value in zip(points, values, strict=True))
    return rise / width if width else 0.0


def _levels(clean: Sequence[Point], noise: float) -> tuple[tuple[Level, ...], Drift | None]:
    logs = [log(point.seconds) for point in clean]
    drift = _drift(clean, noise)
    if drift is not None:
        return (_level(clean),), drift
    spans = _merged(list(_cuts(logs, 0, len(logs), noise, DEEPEST)), logs)
    return tuple(_level(clean[first:last]) for first, last in spans), None


def _level(points: Sequence[Point]) -> Level:
    return Level(points[0].step, points[-1].step, median(point.seconds for point in points), len(points))


def _cuts(logs: Sequence[float], first: int, last: int, noise: float, deep: int) -> Iterator[tuple[int, int]]:
    """The spans of levels between two lines."""
    cut = _best_cut(logs[first:last]) if deep else None
    if cut is not None:
        left, right = logs[first : first + cut], logs[first + cut : last]
        sure = SURE * noise * sqrt(1 / len(left) + 1 / len(right))
        if abs(fmean(right) - fmean(left)) > max(sure, LEAST_SHIFT):
            yield from _cuts(logs, first, first + cut, noise, deep - 1)
            yield from _cuts(logs, first + cut, last, noise, deep - 1)
            return
    yield first, last


def _merged(spans: list[tuple[int, int]], logs: Sequence[float]) -> list[tuple[int, int]]:
    """The spans, neighbours of about the same level together."""
    found = spans[:1]
    for first, last in spans[1:]:
        before = found[-1]
        if abs(median(logs[slice(*before)]) - median(logs[first:last])) < LEAST_SHIFT:
            found[-1] = (before[0], last)
        else:
            found.append((first, last))
    return found


def _best_cut(values: Sequence[float]) -> int | None:
    """The number of values before the cut whose two means fit best; None where they are too few."""
    total, before, best = sum(values), 0.0, (0.0, -1)
    for cut, value in enumerate(values[:-LEAST_LINES], 1):
        before += value
        if cut >= LEAST_LINES:
            rest = len(values) - cut
            best = max(best, (before**2 / cut + (total - before) ** 2 / rest - total**2 / len(values), cut))
    return best[1] if best[1] > 0 else None


def _drift(clean: Sequence[Point], noise: float) -> Drift | None:
    """The straight line of the longest start, where steps become longer or shorter along it, and it
    fits better than two levels."""
    own = _longest(clean)
    if len(own) < 3 * LEAST_LINES:
        return None
    y = [log(point.seconds) for point in own]
    slope, mean_x, mean_y = _slope(own, y), fmean(point.step for point in own), fmean(y)
    length = own[-1].step - own[0].step
    width = sqrt(sum((point.step - mean_x) ** 2 for point in own)) or 1.0
    if abs(slope * length) < max(LEAST_DRIFT, SURE * noise * length / width):
        return None
    left = sum((value - mean_y - slope * (point.step - mean_x)) ** 2 for point, value in zip(own, y, strict=True))
    cut = _best_cut(y)
    if cut is not None and sum(_squares(part) for part in (y[:cut], y[cut:])) + CHOICE * noise**2 < left:
        return None
    part = max(LEAST_LINES, len(own) // 10)
    begin, end = (median(point.seconds for point in some) for some in (own[:part], own[-part:]))
    return Drift(own[0].step, own[-1].step, begin, end)


def _squares(values: Sequence[float]) -> float:
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values)


def _spread(clean: Sequence[Point], levels: Sequence[Level], drift: Drift | None) -> float:
    """Standard deviation of a line about its level, as a share of it; about the drift the noise."""
    if drift is not None:
        usual = median(point.seconds for point in clean)
        return _noise([point.seconds / usual for point in clean])
    ends = [level.last for level in levels]
    of = [levels[min(bisect_left(ends, point.step), len(levels) - 1)].seconds for point in clean]
    return NORMAL * median(abs(point.seconds / at - 1) for point, at in zip(clean, of, strict=True))
