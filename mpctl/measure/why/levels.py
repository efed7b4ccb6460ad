"""Causes of a run that is slow from its first step to its last, each priced by the plan.

Each cause is a hypothesis: with it, the plan takes other seconds. Settings that may not be in effect
are one plan each; a part of the system that is slower is a plan for each factor k, of which each has
a chance. The weight of a hypothesis is its prior times the chance of the measured seconds under it
(a normal distribution of their logarithm, as wide as the plan's band), and of the logged memory.
Priors follow section 6 of published cases (causes.py): silent faults before settings that differ
from the command line. Devices are mostly slower by up to a fifth (heat, power limits), at times by half
and more (NVML's hardware slowdown); networks by any factor up to that of sockets for InfiniBand.

By hand, planned 10 s, measured 15 s: a device at 1/1.5 has the chance exp(-0.41 / 0.2) of one at full
speed, a network at 1/4 that of any other factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import exp, inf, log, pi, sqrt
from typing import Any, NamedTuple

from mpctl.core.units import bytes_text, seconds_text
from mpctl.measure.why.planned import Planned, SecondsAt
from mpctl.measure.why.suspects import RunFacts, Suspect
from mpctl.plan.planning.layout_settings import setting_text

LEAST_SPREAD, MOST_SPREAD = 0.03, 0.1
"""Of the plan's logarithm, where hypotheses are compared: what makes the plan of an unmeasured system
wrong moves all of them alike."""
MEMORY_SPREAD, UNLIKELY = 0.06, 0.02
"""Peaks are within 1 to 5 % of their plan (docs/benchmarks.md), and a log may count other ranks."""
FINE = 60
"""Factors of a slower part that are weighed."""
LEAST_WEIGHT = 0.02
"""Of the likeliest: less is not told."""
WORTH = 0.02
"""Share of a step that a setting saves at least, to be told."""
TOO_FULL, DOUBTED = 1.1, 0.3
"""Times the device's memory: what runs hardly needs so much; its chance then."""


class Slower(NamedTuple):
    """A part of the system that may be slower. most: the largest factor; usual: the mean of log k where
    small factors are likelier, None where all are alike; where: whether the job has the part."""

    cause: str
    prior: float
    most: float
    usual: float | None
    where: Callable[[Planned], bool]
    seconds: Callable[[Planned], SecondsAt]
    what: str


class Setting(NamedTuple):
    """A setting that may be missing, or not in effect. bad: its values without it. prior: that it is not
    in effect though the job has it; 0 where that shows as something else."""

    cause: str
    name: str
    good: Any
    bad: tuple[Any, ...]
    prior: float = 0.0

    def value(self, planned: Planned) -> Any:
        table, _, key = self.name.partition(".")
        return getattr(getattr(planned.job, table), key)


def _has_nodes(planned: Planned) -> bool:
    cluster = planned.job.cluster
    return cluster.inter_node is not None and cluster.nodes > 1


def _has_node(planned: Planned) -> bool:
    return planned.job.cluster.intra_node is not None and (planned.job.cluster.gpus_per_node or 1) > 1


def _on_gpus(planned: Planned) -> bool:
    return planned.job.device_kind != "cpu"


def _on_cores(planned: Planned) -> bool:
    return planned.job.device_kind == "cpu"


PARTS = (
    Slower("device-clock", 1.0, 2.5, 0.2, _on_gpus, lambda p: p.slower_kernels, "kernels"),
    Slower("busy-host", 1.0, 20.0, 0.7, _on_cores, lambda p: p.slower_kernels, "kernels"),
    Slower("network", 1.5, 200.0, 1.2, _has_nodes, lambda p: p.slower_link("inter_node"), "messages between nodes"),
    Slower("intra-node", 0.4, 16.0, None, _has_node, lambda p: p.slower_link("intra_node"), "messages inside a node"),
    Slower("host-bound", 0.5, 10.0, None, _on_gpus, lambda p: p.slower_host, "launches"),
    Slower(
        "pipeline-split", 0.8, 2.0, 0.15, lambda p: p.job.parallel.pp > 1, lambda p: p.slower_stage, "the last stage"
    ),
    Slower(
        "moe-imbalance", 1.0, 4.0, 0.3, lambda p: p.job.has_experts, lambda p: p.fuller_rank, "experts' fullest rank"
    ),
)
SETTINGS = (
    Setting("overlap", "parallel.overlap_gradients", True, (False,), 0.4),
    Setting("tp-comm-overlap", "parallel.tp_comm_overlap", True, (False,), 0.3),
    Setting("attention", "model.attention", "flash", ("unfused",), 0.3),
    Setting("recompute", "training.recompute", "none", ("full", "selective"), 0.1),
    Setting("fp32", "training.dtype", "bf16", ("tf32", "fp32"), 0.25),
    Setting("sequence-parallel", "parallel.sequence_parallel", True, (False,), 0.1),
    Setting("distributed-optimizer", "parallel.zero", 1, (0,)),
)


def flat_suspects(facts: RunFacts) -> Iterator[Suspect]:
    """Causes of a run above the plan's band from its first step on, none for one inside it."""
    if not facts.is_slow:
        return
    found = [*_slower_parts(facts), *_not_in_effect(facts)]
    best = max((suspect.weight for suspect in found), default=1.0)
    found += _missing(facts, best)
    yield from (suspect for suspect in found if suspect.weight >= LEAST_WEIGHT * best)


def chance(planned: float, measured: float, spread: float) -> float:
    """The density of the logarithm of the measured seconds under a plan."""
    z = log(measured / planned) / spread
    return exp(-z * z / 2) / (spread * sqrt(2 * pi))


def _slower_parts(facts: RunFacts) -> Iterator[Suspect]:
    planned, measured = facts.planned, facts.shape.base
    spread = min(max(planned.spread, LEAST_SPREAD), MOST_SPREAD)
    for part in PARTS:
        if not part.where(planned):
            continue
        slowed = planned.slowed(part.seconds(planned), part.most)
        weight = total = 0.0
        for n in range(FINE):
            k = part.most ** (n / (FINE - 1))
            prior = exp(-log(k) / part.usual) if part.usual else 1.0
            weight += prior * chance(slowed.at(k), measured, spread)
            total += prior
        factor = slowed.factor_of(measured)
        if factor is None:
            end = f"not even 1/{part.most:g} of the planned speed explains it ({seconds_text(slowed.seconds[-1])})"
        else:
            end = f"1/{factor:.2g} of the planned speed explains {seconds_text(measured)}"
            if part.cause in ("pipeline-split", "moe-imbalance"):
                end = f"{factor:.2g} times the planned work explains {seconds_text(measured)}"
        likely = part.prior * weight / total * _memory_chance(facts, planned)
        yield Suspect("flat", part.cause, facts.gap, f"{part.what}: {end}", likely)


def _not_in_effect(facts: RunFacts) -> Iterator[Suspect]:
    """Settings of the job that may not be in effect."""
    planned, measured = facts.planned, facts.shape.base
    spread = min(max(planned.spread, LEAST_SPREAD), MOST_SPREAD)
    limit = planned.job.cluster.device.memory_bytes if planned.job.cluster.device else inf
    for setting in SETTINGS:
        if not setting.prior or setting.value(planned) != setting.good:
            continue
        for bad in setting.bad:
            other = planned.with_settings({setting.name: bad})
            if other is None or other.time.total - planned.time.total < WORTH * planned.time.total:
                continue
            weight = setting.prior * chance(other.time.total, measured, spread) * _memory_chance(facts, other)
            weight *= DOUBTED if other.estimate.device_bytes > TOO_FULL * limit else 1.0
            text = f"the job has {_said(setting, setting.good)}; with {_said(setting, bad)} in effect, "
            text += f"the plan is {seconds_text(other.time.total)}{_memory_text(facts, other)}"
            cost = min(other.time.total - planned.time.total, facts.gap)
            yield Suspect("flat", setting.cause, cost, text, weight)


def _missing(facts: RunFacts, best: float) -> Iterator[Suspect]:
    """Settings that the job lacks. The plan has their cost already, and may be wrong about it."""
    for setting, saved in missing_settings(facts.planned):
        text = f"the job has {_said(setting, setting.value(facts.planned))}; "
        text += f"planned with {_said(setting, setting.good)} a step takes {seconds_text(saved)} less"
        weight = best * 0.6 * min(1.0, saved / facts.gap)
        yield Suspect("flat", setting.cause, saved, text, weight)


def missing_settings(planned: Planned) -> Iterator[tuple[Setting, float]]:
    """The settings that the job lacks, that fit the memory and save WORTH of a step, with seconds."""
    for setting in SETTINGS:
        if setting.value(planned) not in setting.bad or (setting.cause == "fp32" and _on_cores(planned)):
            continue
        better = planned.with_settings({setting.name: setting.good})
        if better is None or better.estimate.fits is False:
            continue
        saved = planned.time.total - better.time.total
        if saved >= WORTH * planned.time.total:
            yield setting, saved


def _said(setting: Setting, value: Any) -> str:
    """`recompute full`, `overlap gradients on`."""
    return setting_text(setting.name, value)


def planned_memory(planned: Planned, kind: str) -> float:
    """Bytes of the fullest rank: `allocated` or `reserved`."""
    stage = planned.estimate.fullest_stage
    return float(stage.allocated_bytes if kind == "allocated" else stage.reserved_bytes)


def _memory_chance(facts: RunFacts, planned: Planned) -> float:
    for kind, measured in facts.observed.memory.items():
        z = log(measured / planned_memory(planned, kind)) / MEMORY_SPREAD
        return max(exp(-z * z / 2), UNLIKELY)
    return 1.0


def _memory_text(facts: RunFacts, planned: Planned) -> str:
    for kind, measured in facts.observed.memory.items():
        return f" and {bytes_text(planned_memory(planned, kind))} (logged: {bytes_text(measured)})"
    return ""
