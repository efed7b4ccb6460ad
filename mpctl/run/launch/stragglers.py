"""Ranks that compute longer than the ranks that have the same work, by their step logs.

A step takes as long as its slowest rank: the others wait for it in their collectives. So the length
of a step does not say who is slow. What a rank computes by itself does (records/rundir/step_log.py): the
length of its step without the time in messages. Once a second the last WINDOW steps that all ranks
have logged are compared, by two laws.

Equals. Ranks of one pipeline stage have the same planned work: the same layers, and equal shares of
the batch, the sequence and the parameters. A step of a rank is slow if the rank computed FACTOR
times as long as the median of the *other* ranks of its stage. With one other rank that is the
other one, and the slower of the two is named.

Stages. Stages have different work (the embedding, the loss, unequal layers), so a rank without
equals, or a host that holds a whole stage, is compared by its own past: what a rank computes over
what it computed in its first WINDOW steps. A step of a stage is slow if that figure, of its rank
where it is least, is FACTOR times the median of the other stages' figures. This law does not see
what was slow from the start, and nothing in a run of one rank.

A rank is a straggler once NAMED of the last WINDOW steps were slow, and stays one until half of
them are not. So it is named NAMED steps after it began, and the next report. The law does not
depend on the distribution of the noise: an even rank that is slow by chance in a share p of the
steps is named in a window with the chance of at least 16 of 20: 3e-13 for p = 0.1, 5e-6 for 0.3,
0.006 for 0.5, which is the most that p can be between equals. What costs the run little is not
named: the excess must be WORTH of the step's length. Steps in which a rank of the stage wrote a
checkpoint do not count.

By hand, four equal ranks that compute 35, 36, 35 and 63 ms in each step of 70 ms: the others'
median of rank 3 is 35, 63 / 35 = 1.8, and 28 of 70 ms are lost; of rank 1 it is 35 too, 36 / 35 =
1.03.

Processor time tells why: a rank that used as much of it as its equals did the same work and did not
get its cores all the time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from mpctl.core.units import ranks_text
from mpctl.records.rundir.slow import SlowPart
from mpctl.records.rundir.step_log import NOT_COMPARED, WINDOW, StepTimes

FACTOR = 1.2
NAMED = 16
WORTH = 0.05
SAME_PROCESSOR_TIME = 0.5
"""The share of a rank's excess by which its processor time may exceed its equals' and still count
as the same."""
Times = Mapping[int, StepTimes]
Figures = Mapping[int, float]
"""By step."""


@dataclass(frozen=True)
class Judgement:
    """A rank or a stage against the median of others. slow: its slow steps; counted: of which;
    ratio, excess: medians over the slow steps of the quotient and of the difference."""

    slow: tuple[int, ...]
    counted: Sequence[int]
    ratio: float
    excess: float

    def holds(self, *, before: bool) -> bool:
        """Whether it is slow. before: whether it was so far."""
        if before:  # too few steps say nothing new
            return len(self.counted) < WINDOW // 2 or 2 * len(self.slow) > len(self.counted)
        return len(self.slow) >= NAMED

    @property
    def since(self) -> int:
        """The first slow step from which on as many are slow as a straggler's; some steps before
        were slow by chance."""
        for number, step in enumerate(self.slow):
            rest = len(self.counted) - bisect_left(self.counted, step)
            if (len(self.slow) - number) * WINDOW >= NAMED * rest:
                return step
        return self.slow[-1]


@dataclass(frozen=True)
class Straggler:
    """Slowness of a rank now. is_by_past: compared with its own past; lost: microseconds of a step."""

    ratio: float
    since: int
    lost: float
    is_by_past: bool


@dataclass
class StragglerWatch:
    """Finds the stragglers of one attempt. stages: the pipeline stage of each rank; on_processors:
    whether ranks compute with processor time; hosts: of each rank; past: microseconds that a rank
    computed in a step, over its first WINDOW; stragglers: now.
    """

    stages: Sequence[int]
    on_processors: bool = False
    hosts: Mapping[int, str] = field(default_factory=dict)
    past: dict[int, float] = field(default_factory=dict)
    stragglers: dict[int, Straggler] = field(default_factory=dict)

    def find(self, times: Times) -> list[SlowPart]:
        """The stragglers now, those of a host together if all of its ranks are. times: of every
        rank, by rank."""
        steps = common_steps(times.values())
        for rank, of in times.items():
            if rank not in self.past and of.is_full:
                self.past[rank] = _median_of(of, of.steps[:WINDOW])
        if len(steps) == WINDOW:  # else what is known stays
            self.stragglers = self._judge(times, steps)
        parts = self._parts()
        return [self._describe(ranks, times, steps[-1] if steps else 0) for ranks in parts]

    def growth(self, times: Times) -> dict[int, float]:
        """Return the computing time of each rank relative to its first steps; at least 1."""
        recent = {rank: _median_of(of, of.steps[-WINDOW:]) for rank, of in times.items()}
        return {r: max(1.0, n / self.past[r]) for r, n in recent.items() if self.past.get(r)}

    def _judge(self, times: Times, steps: range) -> dict[int, Straggler]:
        """By both laws; that of equals goes before."""
        by_stage: defaultdict[int, list[int]] = defaultdict(list)
        for rank in sorted(times):
            by_stage[self.stages[rank]].append(rank)
        found: dict[int, Straggler] = {}
        figures: dict[int, Figures] = {}
        for stage, ranks in by_stage.items():
            windows = {rank: times[rank].window(steps) for rank in ranks}
            columns = zip(steps, *windows.values(), strict=True)
            counted = [step for step, *of_step in columns if NOT_COMPARED not in of_step]
            places = [step - steps.start for step in counted]
            own = {
                rank: dict(zip(counted, [float(window[place]) for place in places], strict=True))
                for rank, window in windows.items()
            }
            for rank, judged in compare(own).items():
                self._note(found, rank, judged, times[rank], judged.excess, is_by_past=False)
            if all(self.past.get(rank) for rank in ranks):
                figures[stage] = {s: min(own[r][s] / self.past[r] for r in ranks) for s in counted}
        for stage, judged in compare(figures).items():
            for rank in by_stage[stage]:
                lost = judged.excess * self.past[rank]
                self._note(found, rank, judged, times[rank], lost, is_by_past=True)
        return found

    def _note(
        self, found: dict[int, Straggler], rank: int, judged: Judgement, of: StepTimes, lost: float, *, is_by_past: bool
    ) -> None:
        before = self.stragglers.get(rank)
        was = before is not None and before.is_by_past == is_by_past
        if rank in found or not judged.holds(before=was):
            return
        if before is not None and was:
            now = Straggler(judged.ratio, before.since, lost, is_by_past)
            found[rank] = now if judged.slow else before
        elif lost >= WORTH * of.length:
            found[rank] = Straggler(judged.ratio, judged.since, lost, is_by_past)

    def _parts(self) -> list[tuple[int, ...]]:
        """The stragglers, each alone, but all ranks of a host together if all are among them."""
        by_host: defaultdict[str, list[int]] = defaultdict(list)
        for rank in sorted(self.stragglers):
            by_host[self.hosts.get(rank, "")].append(rank)
        parts: list[tuple[int, ...]] = []
        for host, ranks in by_host.items():
            parts += [tuple(ranks)] if self._is_all_of(host, ranks) else [(r,) for r in ranks]
        return parts

    def _is_all_of(self, host: str, ranks: Sequence[int]) -> bool:
        """Whether these are all ranks of a host, of several."""
        of_host = [rank for rank, name in self.hosts.items() if name == host]
        return len(of_host) == len(ranks) > 1 and len(of_host) < len(self.hosts)

    def _describe(self, ranks: tuple[int, ...], times: Times, newest: int) -> SlowPart:
        found = [self.stragglers[rank] for rank in ranks]
        ratio, since = median(one.ratio for one in found), min(one.since for one in found)
        stage = self.stages[ranks[0]]
        equals = [r for r in times if self.stages[r] == stage and r not in self.stragglers]
        names: tuple[str, ...] = ()
        if len(set(self.hosts.values())) > 1:
            names = (self.hosts[ranks[0]],)
        who = ranks_text(ranks)
        if len(ranks) > 1:
            who = f"host {names[0]} ({who})"
        elif names:
            who = f"{who} on host {names[0]}"
        if found[0].is_by_past:
            whom = "it did at first, against the other stages,"
        elif len(equals) == 1:
            whom = f"rank {equals[0]}, its only equal,"
        else:
            whom = "its equals"
        lost = median(one.lost for one in found) / 1e3
        why = "" if found[0].is_by_past else self._why(ranks, equals, times, ratio)
        text = f"{who} computes {ratio:.1f} times as long as {whom} since step {since}, {lost:.0f} ms of a step{why}"
        return SlowPart("ranks", who, ranks, names, "", round(ratio, 2), since, newest, text)

    def _why(self, ranks: Sequence[int], equals: Sequence[int], times: Times, ratio: float) -> str:
        """Describe the cause by processor time, if ranks compute with it."""
        if not equals or not self.on_processors:
            return ""
        own, usual = (median(times[r].processor for r in some) for some in (ranks, equals))
        if own < usual * (1 + SAME_PROCESSOR_TIME * (ratio - 1)):
            return "; it uses no more processor time: something else takes its cores, or a limit"
        return "; it uses more processor time, too: more work, or a slower processor"


def compare(figures: Mapping[int, Figures]) -> dict[int, Judgement]:
    """Each against the median of the others, in the steps that all have; nothing for one alone."""
    if len(figures) < 2:
        return {}
    steps = sorted(set.intersection(*(set(one) for one in figures.values())))
    slow: dict[int, list[tuple[int, float, float]]] = {name: [] for name in figures}
    for step in steps:
        of_step = [one[step] for one in figures.values()]
        ordered = sorted(of_step)
        least = FACTOR * _median_without(ordered, len(ordered) - 1)
        for name, figure in zip(figures, of_step, strict=True):
            if figure < least:  # no median of others is less than that without the greatest
                continue
            usual = _median_without(ordered, bisect_left(ordered, figure))
            if figure >= FACTOR * usual and usual > 0:
                slow[name].append((step, figure / usual, figure - usual))
    return {name: _judgement(found, steps) for name, found in slow.items()}


def _judgement(slow: Sequence[tuple[int, float, float]], counted: Sequence[int]) -> Judgement:
    if not slow:
        return Judgement((), counted, 1.0, 0.0)
    ratio, excess = median(ratio for _, ratio, _ in slow), median(more for _, _, more in slow)
    return Judgement(tuple(step for step, _, _ in slow), counted, ratio, excess)


def _median_without(ordered: Sequence[float], left_out: int) -> float:
    """The median of sorted numbers without one of them."""
    rest = len(ordered) - 1
    places = ((rest - 1) // 2, rest // 2)
    return sum(ordered[place + (place >= left_out)] for place in places) / 2


def common_steps(times: Iterable[StepTimes]) -> range:
    """The last steps, at most WINDOW, that all of these have logged."""
    logged = [of.steps for of in times]
    if not logged:
        return range(0)
    end = min(steps.stop for steps in logged)
    return range(max(end - WINDOW, *(steps.start for steps in logged)), end)


def _median_of(of: StepTimes, steps: range) -> float:
    """Return the median computing time of a rank in these steps; 0 if none counts."""
    counted = [n for n in of.window(steps) if n != NOT_COMPARED]
    return median(counted) if counted else 0.0
