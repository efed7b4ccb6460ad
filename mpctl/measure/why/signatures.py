"""The forms in which slow steps show in a log, and the causes that each points to.

A signature is a function of the facts that yields suspects, a row of SIGNATURES. Thresholds of the
shape are in series.py. Which cause comes first follows section 6 of the published cases (causes.py):
a sudden level is a GPU, then a link; a slow rise is host work, then heat; spikes with a period are
what the log says came before them, else checkpoints, loaders or collections by their size; spikes
without one are collections, then loaders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from mpctl.core.units import bytes_text, count_text, plural, seconds_text
from mpctl.measure.why.levels import flat_suspects, planned_memory
from mpctl.measure.why.series import Level, Spike
from mpctl.measure.why.suspects import RunFacts, Suspect
from mpctl.records.rundir.summary import WARM_UP_STEPS

WORTH, WORTH_LOGGED = 0.015, 0.05
"""Share of a run that spikes take at least: of unknown origin, and of checkpoints and evaluations, which
every run has."""
LEAST_BURSTS = 3
LARGE = 0.5
"""Of a step: more than this is no collection (0.06 s in torchtitan) and no profiler (5 %)."""
ROUND = 10
"""A period that is a multiple of this was set by someone."""
HEAT = 0.08
"""Clocks fall by no more while devices warm up (1 to 2 % by time of day, 6 % in a node)."""
HEAD = 0.3
"""Share of the lines up to which a slow beginning is one of first steps."""
FULL = 0.95
"""Share of the device's memory from which allocators retry."""
STRAGGLER = 1.1
"""Times as long as the fastest rank: jobs count as slowed from there on (arXiv 2505.05713)."""
_ROUND_TRIPS = re.compile(r"MnRtt/Rnk: ?([\d.]{1,12}) ?ms/(\d{1,7}).{0,8}MxRtt/Rnk: ?([\d.]{1,12}) ?ms/(\d{1,7})")
GOT = 0.7
"""Share of the time in which a rank computes that it has a core at least."""
SAME = 0.03
A100 = 312e12
"""FLOP/s that torchtitan takes for a device that it does not know."""


def named_suspects(facts: RunFacts) -> Iterator[Suspect]:
    """What the log, or the launcher of a run of mpctl, names itself."""
    found, first = (
        facts.observed.events.found,
        facts.observed.points[min(WARM_UP_STEPS, len(facts.observed.points) - 1)].step,
    )
    over = max(facts.shape.median - facts.planned.time.total, 0.0) or None
    for name, cause in (("retries", "allocator-retries"), ("flushes", "allocator-retries"), ("port", "link-errors")):
        event = found.get(name)
        if event is not None and event.last > first:
            text = f"{count_text(event.total)} times in {plural(event.lines, 'line')}, up to step {event.last}"
            text += f": {event.text}"
            yield Suspect("log", cause, over, text, is_direct=True)
    if (event := found.get("sockets")) is not None and facts.planned.job.cluster.nodes > 1:
        yield Suspect("log", "sockets", over, event.text, is_direct=True)
    if (event := found.get("straggler")) is not None and (times := _ROUND_TRIPS.search(event.text)):
        fast, slow = float(times[1]), float(times[3])
        if slow >= STRAGGLER * fast > 0:
            text = f"rank {times[4]} takes {slow:.0f} ms, rank {times[2]} {fast:.0f} ms: {event.text}"
            yield Suspect("log", "straggler", (slow - fast) / 1e3, text, is_direct=True)
    for part in facts.observed.slow:
        yield Suspect(
            "slow-rank", "straggler" if part.kind == "ranks" else "slow-link", None, part.text, is_direct=True
        )


def processor_suspects(facts: RunFacts) -> Iterator[Suspect]:
    """Ranks on cores, slower than planned, that did not get their cores all the time."""
    observed, seconds = facts.observed, facts.observed.seconds
    computing = seconds - sum(observed.communication.values())
    if observed.processor is None or facts.planned.job.device_kind != "cpu" or not facts.is_slow:
        return
    if observed.processor < GOT * computing:
        text = f"rank 0 computed for {seconds_text(computing)} of a step, with {seconds_text(observed.processor)} "
        text += "of processor time"
        yield Suspect("processor", "busy-host", computing - observed.processor, text, is_direct=True)


def memory_suspects(facts: RunFacts) -> Iterator[Suspect]:
    """Memory that is nearly full, in a run above the band."""
    device, reserved = facts.planned.job.cluster.device, facts.observed.memory.get("reserved")
    if device is None or not reserved or not facts.is_slow or reserved < FULL * device.memory_bytes:
        return
    text = f"{bytes_text(reserved)} of {bytes_text(device.memory_bytes)} reserved"
    yield Suspect("flat", "memory-full", facts.gap, text, 0.3)


def shift_suspects(facts: RunFacts) -> Iterator[Suspect]:
    """A level that begins or ends at one step."""
    levels = facts.shape.levels
    if len(levels) < 2:
        return
    fast = min(levels, key=lambda level: level.seconds)
    slow = max(levels, key=lambda level: level.seconds)
    lost, ratio = slow.seconds - fast.seconds, slow.seconds / fast.seconds
    begins = levels.index(slow) > levels.index(fast)
    text = f"{100 * (ratio - 1):.1f} % longer {_when(slow, levels)}: "
    text += f"{seconds_text(fast.seconds)} and {seconds_text(slow.seconds)}"
    restarted = _restart_before(facts, (slow if begins else fast).first)
    text += f"; the run was restarted at step {restarted}: other hosts?" if restarted is not None else "; no restart"
    if slow is levels[0] and slow.lines <= HEAD * facts.shape.lines and not begins:
        yield Suspect("first-steps", "first-steps", lost, text, 1.2)
    yield Suspect("level-shift", "slow-gpu", lost, f"{text}; it computes at 1/{ratio:.2f}", 1.0)
    if facts.planned.job.world_size > 1:
        yield Suspect("level-shift", "slow-link", lost, text + _network_factor(facts, ratio), 0.8)


def _when(slow: Level, levels: Sequence[Level]) -> str:
    if slow is levels[-1]:
        return f"from step {slow.first} on"
    return f"until step {slow.last}" if slow is levels[0] else f"from step {slow.first} to {slow.last}"


def _restart_before(facts: RunFacts, step: int) -> int | None:
    """The first step of a start that began about this step; None where none did."""
    near = 3 * facts.shape.interval
    points = facts.observed.points
    changes = (b for a, b in pairwise(points) if a.start != b.start)
    return next((point.step for point in changes if abs(point.step - step) <= near), None)


def _network_factor(facts: RunFacts, ratio: float) -> str:
    planned = facts.planned
    if planned.job.cluster.nodes == 1 or planned.job.cluster.inter_node is None:
        return ""
    factor = planned.slowed(planned.slower_link("inter_node"), 30.0).factor_of(ratio * planned.time.total)
    return f"; a network at 1/{factor:.2g} would do it" if factor else "; no network alone would do it"


def drift_suspects(facts: RunFacts) -> Iterator[Suspect]:
    """Steps that become longer and longer."""
    drift = facts.shape.drift
    if drift is None or drift.rise <= 0:
        return
    text = f"from {seconds_text(drift.begin)} at step {drift.first} to {seconds_text(drift.end)} at step {drift.last}, "
    text += f"{100 * drift.rise:.1f} % longer, on a line"
    restart = _restart_before(facts, drift.last)
    text += f"; the run was restarted at step {restart}" if restart is not None else ""
    lost = drift.end - drift.begin
    if facts.planned.job.has_experts:
        yield Suspect("drift", "moe-imbalance", lost, text, 1.0)
    yield Suspect("drift", "host-growth", lost, text, 0.9)
    yield Suspect("drift", "heat", lost, text, 0.8 if drift.rise <= HEAT else 0.4)


def spike_suspects(facts: RunFacts) -> Iterator[Suspect]:
    """Steps that are longer than their neighbours, with a period or without."""
    shape = facts.shape
    for after, cause in (("checkpoint", "checkpoint"), ("evaluation", "evaluation")):
        bursts = shape.bursts(after)
        cost = shape.cost(bursts)
        if cost >= WORTH_LOGGED * shape.median:
            yield Suspect(
                "periodic-spikes", cause, cost, _spikes_text(facts, bursts, f"after each {after}"), is_direct=True
            )
    bursts = shape.bursts("")
    cost = shape.cost([spike for spike in shape.spikes if not spike.point.after])
    if len(bursts) < LEAST_BURSTS:
        return
    period = shape.period(bursts)
    causes = _spike_causes(facts, bursts, period)
    if cost < (WORTH_LOGGED if causes[0] == "checkpoint" else WORTH) * shape.median:
        return
    text = _spikes_text(facts, bursts, f"every {period} steps" if period else "without a period")
    form = "periodic-spikes" if period else "random-spikes"
    for rank, cause in enumerate(causes):
        yield Suspect(form, cause, cost, text, 1.0 - 0.2 * rank)


def _spike_causes(facts: RunFacts, bursts: Sequence[Spike], period: int | None) -> tuple[str, ...]:
    if period is None:
        return "gc", "loader", "sequence-spread"
    excess = sorted(spike.excess for spike in bursts)[len(bursts) // 2]
    if period % ROUND:
        return "loader", "gc"
    if excess < LARGE * facts.shape.median:
        return "gc", "loader", "profiler"
    return "checkpoint", "loader", "evaluation"


def _spikes_text(facts: RunFacts, bursts: Sequence[Spike], when: str) -> str:
    excess = sorted(spike.excess for spike in bursts)[len(bursts) // 2]
    steps = ", ".join(str(spike.point.step) for spike in bursts[:4])
    more = ", ..." if len(bursts) > 4 else ""
    return f"{plural(len(bursts), 'spike')} of {seconds_text(excess)} {when} (steps {steps}{more})"


def spread_suspects(facts: RunFacts) -> Iterator[Suspect]:
    """Lines that vary more than ordinary ones."""
    shape = facts.shape
    if not shape.is_wide or shape.lines < 4 * LEAST_BURSTS:
        return
    text = f"lines vary by {100 * shape.noise:.1f} % (one standard deviation) about the same level"
    lost = shape.median - shape.quick
    yield Suspect("wide-spread", "sequence-spread", lost, text, 1.0)
    yield Suspect("wide-spread", "loader", lost, text, 0.8)


def first_suspects(facts: RunFacts) -> Iterator[Suspect]:
    """More than the usual first steps are slow."""
    warm, shape = facts.shape.warm_up, facts.shape
    if len(warm) <= WARM_UP_STEPS:
        return
    excess = sum(point.seconds - shape.median for point in warm)
    text = (
        f"{plural(len(warm), 'line')} up to step {warm[-1].step} take {seconds_text(excess)} more than later ones, once"
    )
    yield Suspect("first-steps", "first-steps", excess / (shape.lines + len(warm)), text)


def counting_suspects(facts: RunFacts) -> Iterator[Suspect]:
    """An MFU that is counted against another peak than the device's dense one. Read only where the log
    prints FLOP/s too, as conventions of FLOP differ by a third."""
    observed, peak = facts.observed, facts.planned.time.peak
    if not observed.mfu or not observed.tflops:
        return
    used, share = 1e12 * observed.tflops / observed.mfu, 1e12 * observed.tflops / peak
    text = f"the log's {observed.tflops:.0f} TFLOP/s and MFU {observed.mfu:.1%} are of {used / 1e12:.0f} TFLOP/s"
    for name, other in (("the device's peak with sparsity", 2 * peak), ("an A100's peak", A100)):
        if abs(used / other - 1) < SAME and abs(used / peak - 1) > SAME:
            text += f", {name}: of the dense {peak / 1e12:.0f} it is {share:.1%}"
            yield Suspect("counting", "counting", 0.0, text, is_direct=True)
            return


def fast_suspects(facts: RunFacts) -> Iterator[Suspect]:
    """A run below the plan's band."""
    if facts.shape.median < facts.planned.time.low:
        text = "it is faster than nine of ten runs of this job would be"
        for kind, size in facts.observed.memory.items():
            text += f"; {kind} {bytes_text(size)}, planned {bytes_text(planned_memory(facts.planned, kind))}"
        yield Suspect("fast", "other-job", None, text)


Signature = Callable[[RunFacts], Iterator[Suspect]]
SIGNATURES: tuple[Signature, ...] = (
    named_suspects,
    counting_suspects,
    shift_suspects,
    drift_suspects,
    spike_suspects,
    spread_suspects,
    first_suspects,
    processor_suspects,
    memory_suspects,
    flat_suspects,
    fast_suspects,
)


def ordered(found: Sequence[Suspect]) -> list[Suspect]:
    """Suspects by likelihood, each cause once: what the log names itself, then by form, the one that
    costs most first, then by weight. The first of a form that costs at least half as much as the form
    before it comes before the second of that."""
    forms: dict[str, list[Suspect]] = {}
    for suspect in sorted(found, key=lambda s: -s.weight):
        forms.setdefault("" if suspect.is_direct else suspect.signature, []).append(suspect)
    named = sorted(forms.pop("", []), key=lambda s: -(s.seconds or 0.0))
    costs = {form: max(s.seconds or 0.0 for s in some) for form, some in forms.items()}
    by_cost = sorted(forms, key=lambda form: -costs[form])
    heads = [forms[form][0] for form in by_cost if 2 * costs[form] >= costs[by_cost[0]]]
    by_cause: dict[str, Suspect] = {}
    for suspect in (*named, *heads, *(s for form in by_cost for s in forms[form])):
        by_cause.setdefault(suspect.cause, suspect)
    return list(by_cause.values())
