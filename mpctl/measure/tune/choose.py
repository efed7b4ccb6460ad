"""Choose the next layout to measure, and decide when to stop: pure functions of plans and measurements.

**Belief.** The logarithm of a layout's step time is x = log(plan) + error, with an error of four
parts, each normal:

    SHARED   of all layouts of the system, a slower machine: vague, as it decides nothing.
    slopes   of the planner's constants, each wrong by its slack: changes of x for that, so that a
             trial of a layout that sends much tells of all that do.
    spread   of layouts the more alike they are: between two, the correlation `alikeness`, the
             product of LIKENESS over the settings that differ, once for each doubling of a size.
    ALONE    of the layout.

A trial measures x with a noise that repeated trials of one layout tell (`noise_of`). Plans and
trials together make a normal distribution of all x (kriging with the plan as its trend; Rasmussen
and Williams, Gaussian Processes for Machine Learning, 2006, section 2.2): one trial moves the means
of all layouts that are like the measured one. Where plans are off by more than their spread, all
spreads are multiplied by the one of SCALES that makes the trials the most likely, a factor of two
being a standard deviation of its prior.

**Stop.** A layout, measured or not, is a rival of the best measured one while the chance that it is
faster by more than WORTH is above DOUBT. The search ends when there is no rival and the best was
measured twice, so that its lead is beyond noise.

**Next.** First the layout with the best plan. Then, of the best and its rivals, the one whose trial
is expected to shorten the final choice most: with m the means and a_j the change of m_j for one
standard deviation of the trial's outcome,

    gain(i) = min(m) - E[ min_j(m_j + a_j z) ],   z normal

(the knowledge gradient for correlated beliefs; Frazier, Powell and Dayanik, INFORMS Journal on
Computing 21(4), 2009). A layout that is surely slow gains nothing, nor does one that is known; one
whose outcome also tells about others gains most. Several trials that are to run at the same time
are chosen one after the other, each as if those before had come out as expected. The first
FIRST_CLASSES layouts split the ranks differently, as far as there are rivals that do: what is like
the best says little of how far off plans of others are. Then the best one is repeated, as nothing
else tells the noise.

By hand, two layouts planned at 1.00 and 1.05 s, both with a spread of 10 % and unlike each other,
the first measured at 1.00 s: the second is faster by more than 2 % with the chance
Phi(-(0.049 + 0.02) / 0.10) = 25 %, a rival. Measured at 1.06 s with 1 % of noise it is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from math import exp, log, log2, sqrt
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING, NamedTuple

from mpctl.plan.planning.layout_settings import LayoutSettings
from mpctl.plan.search.find import LayoutClass, class_of
from mpctl.plan.search.plain import complexity
from mpctl.spec.runtime import PlainLayout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WORTH = 0.01
"""A layout that is faster by less is not worth another trial: the planner's own ties are as wide
(plan/search/find.py, ALIKE)."""
DOUBT = 0.05
SHARED, ALONE = 1.0, 0.01
NOISE, NOISE_TRIALS = 0.02, 2.0  # of a trial before any repeat, and its weight in repeats
FIRST_CLASSES = 4  # layouts of different splits, where there are rivals of so many
MOST_REPEATS = 4  # trials of one layout
MOST_CONSIDERED = 120  # layouts whose gain is computed
# Correlation of the plan's errors of two layouts that differ in one setting: by one doubling of a
# size, or at all.
LIKENESS = {"tp": 0.7, "cp": 0.7, "dp": 0.9, "pp": 0.7, "ep": 0.7, "etp": 0.8, "vpp": 0.85, "micro_batch_size": 0.85}
KINDS = {
    "schedule": 0.8,
    "stage_balance": 0.97,
    "recompute": 0.9,
    "sequence_parallel": 0.93,
    "zero": 0.93,
    "order": 0.93,
    "tensor_mode": 0.5,
    "tensor_depth": 0.8,
    "zero_size": 0.9,
}
SCALES = (1.0, 1.4, 2.0, 2.8, 4.0)
_NORMAL = tuple(NormalDist().inv_cdf((2 * k + 1) / 32) for k in range(16))


class Candidate(NamedTuple):
    """A layout that may be measured. seconds: of a step as planned, after the last fit; spread: of
    its error beyond what all layouts share, a standard deviation of the logarithm; bytes: of its
    fullest rank; slopes: the change of the logarithm of its seconds for a standard deviation of
    each of the planner's constants, in the same order for all candidates."""

    layout: LayoutSettings
    seconds: float
    spread: float
    bytes: int
    slopes: tuple[float, ...] = ()


class MeasuredLayout(NamedTuple):
    """A layout with the step times of its trials, seconds; at least one."""

    candidate: Candidate
    seconds: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Seconds: the geometric mean of the trials."""
        return exp(fmean(map(log, self.seconds)))


class NextTrial(NamedTuple):
    """The next trial. gain: the expected shortening of the final choice, a share of its step; why:
    in words."""

    candidate: Candidate
    gain: float
    why: str


def alikeness(one: LayoutSettings, other: LayoutSettings) -> float:
    """The correlation of the errors of two layouts' plans, 1 for the same layout.

    >>> plain = LayoutSettings(dp=4)
    >>> alikeness(plain, LayoutSettings(dp=4, zero=1)), alikeness(plain, plain)
    (0.93, 1.0)
    """
    alike = 1.0
    for name, a, b in zip(one._fields, one, other, strict=True):
        if a == b:
            continue
        if name in LIKENESS and isinstance(a, int) and isinstance(b, int):
            alike *= LIKENESS[name] ** abs(log2(a / b))
        else:
            alike *= KINDS.get(name, 0.9)
    return alike


def noise_of(measured: Iterable[MeasuredLayout]) -> float:
    """The standard deviation of a trial's logarithm: from repeats, and NOISE with the weight of
    NOISE_TRIALS of them.

    >>> few = Candidate(LayoutSettings(), 1.0, 0.1, 0)
    >>> round(noise_of([MeasuredLayout(few, (1.0, 1.1, 0.9, 1.0))]), 3)
    0.065
    """
    squares, repeats = NOISE_TRIALS * NOISE**2, 0
    for one in measured:
        logs = list(map(log, one.seconds))
        squares += sum((value - fmean(logs)) ** 2 for value in logs)
        repeats += len(logs) - 1
    return sqrt(squares / (NOISE_TRIALS + repeats))


def chance_below(mean: float, deviation: float) -> float:
    """The chance that a normal figure of this mean and standard deviation is below 0."""
    return NormalDist(mean, deviation).cdf(0) if deviation > 0 else float(mean < 0)


@dataclass(frozen=True)
class Belief:
    """Step times of some layouts, inferred from plans and trials.

    candidates: layouts that may be measured; measured: layouts already measured, not necessarily among
    the candidates; scale: a factor on all spreads; plain: what is plain under the runtime.
    """

    candidates: Sequence[Candidate]
    measured: Sequence[MeasuredLayout]
    scale: float = 1.0
    plain: PlainLayout = field(default_factory=PlainLayout)

    @classmethod
    def of(
        cls, candidates: Sequence[Candidate], measured: Sequence[MeasuredLayout], plain: PlainLayout | None = None
    ) -> Belief:
        """The belief with the scale that makes the trials the most likely."""
        plain = plain or PlainLayout()
        if not measured:
            return cls(candidates, measured, plain=plain)
        every = (cls((), measured, scale) for scale in SCALES)
        likeliest = max(every, key=lambda one: one._solved[1] - log2(one.scale) ** 2 / 2)
        return cls(candidates, measured, likeliest.scale, plain)

    @cached_property
    def noise(self) -> float:
        """Standard deviation of one trial, in the logarithm of the step time."""
        return noise_of(self.measured)

    @cached_property
    def points(self) -> list[Candidate]:
        """The measured layouts, then the other candidates."""
        known = {one.candidate.layout for one in self.measured}
        others = (one for one in self.candidates if one.layout not in known)
        return [*(one.candidate for one in self.measured), *others]

    @cached_property
    def _prior(self) -> NDArray[np.float64]:
        """The covariance of the points' errors before any trial, [points, points]."""
        import numpy as np

        points = self.points
        alike = np.array([[alikeness(one.layout, other.layout) for other in points] for one in points])
        spread = self.scale * np.array([point.spread for point in points])
        columns = zip_longest(*(point.slopes for point in points), fillvalue=0.0)
        slopes = np.array(list(columns)).reshape(-1, len(points))
        own = np.outer(spread, spread) * alike + ALONE**2 * np.eye(len(points))
        prior: NDArray[np.float64] = SHARED**2 + own + slopes.T @ slopes
        return prior

    @cached_property
    def _solved(self) -> tuple[NDArray[np.float64], float]:
        """The gain [points, measured], which turns errors of measured plans into shifts of each point's
        mean, and the log likelihood of the trials, up to a constant."""
        import numpy as np
        from scipy.linalg import cho_factor, cho_solve

        count, off = len(self.measured), self._off
        noise = [self.noise**2 / len(one.seconds) for one in self.measured]
        root = cho_factor(self._prior[:count, :count] + np.diag(noise), lower=True)
        gain = cho_solve(root, self._prior[:count]).T
        return gain, float(-np.log(np.diag(root[0])).sum() - off @ cho_solve(root, off) / 2)

    @cached_property
    def _off(self) -> NDArray[np.float64]:
        """The errors of the measured layouts' plans."""
        import numpy as np

        return np.array([log(one.mean / one.candidate.seconds) for one in self.measured])

    @cached_property
    def means(self) -> NDArray[np.float64]:
        """The expected logarithm of the seconds of each point."""
        import numpy as np

        planned: NDArray[np.float64] = np.log([point.seconds for point in self.points])
        return planned + self._solved[0] @ self._off

    @cached_property
    def covariance(self) -> NDArray[np.float64]:
        """The covariance of the points' errors after the trials, [points, points]."""
        return self._prior - self._solved[0] @ self._prior[: len(self.measured)]

    @cached_property
    def best(self) -> int:
        """The number of the best measured point: that of the least mean. At least one layout was
        measured."""
        return int(self.means[: len(self.measured)].argmin())

    def chance(self, at: int) -> float:
        """The chance that a point is faster than the best measured one by more than WORTH."""
        best, covariance = self.best, self.covariance
        spread = covariance[at, at] + covariance[best, best] - 2 * covariance[at, best]
        apart = self.means[at] - self.means[best] + log(1 + WORTH)
        return chance_below(apart, sqrt(max(spread, 0.0)))

    @cached_property
    def rivals(self) -> list[int]:
        """The points whose chance of being faster is above DOUBT and that may be measured again,
        the likeliest first."""
        free = {one.layout for one in self.candidates}
        chances = [
            (self.chance(at), at)
            for at, point in enumerate(self.points)
            if at != self.best and point.layout in free and self._trials(at) < MOST_REPEATS
        ]
        return [at for chance, at in sorted(chances, reverse=True) if chance > DOUBT]

    def _trials(self, at: int) -> int:
        return len(self.measured[at].seconds) if at < len(self.measured) else 0

    def gain(self, at: int, among: Sequence[int]) -> float:
        """The expected shortening of the fastest of some points by one trial of a point, as a share
        of its step."""
        deviation = sqrt(self.covariance[at, at] + self.noise**2)
        means, moves = self.means[among, None], self.covariance[among, at, None] / deviation
        expected = (means + moves * _NORMAL).min(axis=0).mean()
        return max(float(means.min() - expected), 0.0)

    def expecting(self, at: int) -> Belief:
        """The belief after a trial of a point that comes out as expected."""
        point, seconds = self.points[at], exp(self.means[at])
        measured = list(self.measured)
        if at < len(measured):
            measured[at] = MeasuredLayout(point, (*measured[at].seconds, measured[at].mean))
        else:
            measured.append(MeasuredLayout(point, (seconds,)))
        return Belief(self.candidates, measured, self.scale, self.plain)


def is_settled(belief: Belief) -> bool:
    """Whether the best measured layout leads beyond noise: it was measured twice, and no layout is
    its rival."""
    if not belief.measured:
        return not belief.candidates
    best = belief.measured[belief.best]
    again = best.candidate.layout in {one.layout for one in belief.candidates}
    return not belief.rivals and (len(best.seconds) > 1 or not again)


def choose(belief: Belief) -> NextTrial | None:
    """The next trial; None where the search is settled or nothing is left to measure."""
    if not belief.measured:
        return _by_plan(belief)
    if is_settled(belief):
        return None
    best, free = belief.best, {one.layout for one in belief.candidates}
    can_repeat = belief.points[best].layout in free and len(belief.measured[best].seconds) < MOST_REPEATS
    trials = sum(len(one.seconds) for one in belief.measured)
    considered = belief.rivals[:MOST_CONSIDERED]
    new = list(_of_new_classes(belief, considered)) if len(belief.measured) < FIRST_CLASSES else []
    if new:
        considered, can_repeat = new, False
    elif can_repeat and trials == len(belief.measured):
        return NextTrial(belief.points[best], 0.0, "the best again: how much trials vary")
    if not considered:
        return NextTrial(belief.points[best], 0.0, "the best again: a lead is that of two trials")
    among = [best, *considered]
    gains = [(belief.gain(at, among), at) for at in (among if can_repeat else considered)]
    gain = max(gain for gain, _ in gains)
    near = [at for found, at in gains if found >= 0.95 * gain]
    at = min(near, key=lambda at: (complexity(belief.points[at].layout, belief.plain), belief.means[at]))
    return NextTrial(belief.points[at], gain, _why(belief, at))


def _of_new_classes(belief: Belief, numbers: Iterable[int]) -> Iterator[int]:
    """Yield the points that split the ranks in a way not yet measured."""
    known = {_way(one.candidate.layout) for one in belief.measured}
    return (at for at in numbers if _way(belief.points[at].layout) not in known)


def _way(layout: LayoutSettings) -> tuple[LayoutClass, int]:
    return class_of(layout), layout.cp


def choose_several(belief: Belief, count: int) -> list[NextTrial]:
    """Up to `count` trials of different layouts to run at the same time, each chosen as if those
    before had come out as expected."""
    chosen: list[NextTrial] = []
    for _ in range(2 * count):
        choice = choose(belief)
        if choice is None or len(chosen) == count:
            break
        if choice.candidate.layout not in {one.candidate.layout for one in chosen}:
            chosen.append(choice)
        layouts = [point.layout for point in belief.points]
        belief = belief.expecting(layouts.index(choice.candidate.layout))
    return chosen


def _by_plan(belief: Belief) -> NextTrial | None:
    """The plainest of the layouts that are planned to be as fast as the fastest."""
    if not belief.candidates:
        return None
    least = min(one.seconds for one in belief.candidates) * (1 + WORTH)
    near = [one for one in belief.candidates if one.seconds <= least]
    plainest = min(near, key=lambda one: (complexity(one.layout, belief.plain), one.seconds))
    return NextTrial(plainest, 0.0, "the fastest by plan")


def _why(belief: Belief, at: int) -> str:
    if at == belief.best:
        return "the best again: its lead is within noise"
    again = "again: " if at < len(belief.measured) else ""
    return f"{again}{100 * belief.chance(at):.0f} % likely to be faster"
