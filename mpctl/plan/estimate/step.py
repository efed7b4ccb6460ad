"""The time of one training step as a value: its parts, its band, and its FLOP.

The parts are named and ordered here alone: documents, comparisons, batch answers, explanations and
pictures all read `PARTS` and `StepTime.parts()`.

By hand, 4 s of compute, 1 s of tp messages and 1 s of bubble are a step of 6 s; of a rank that does
3e14 model FLOP in it, with a peak of 1e14 FLOP/s, the MFU is 3e14 / 6 / 1e14 = 50 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import exp, hypot
from typing import NamedTuple

from mpctl.core.axes import GRID_AXES, zero_groups
from mpctl.core.units import count_text, plural
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.table import OperatorTable
from mpctl.plan.estimate.communication import Message
from mpctl.plan.estimate.kernels import Speed
from mpctl.plan.estimate.network import Network
from mpctl.plan.estimate.system import SPREAD, find_system, own_spread, unknown_parts
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import OverlapShares, RuntimeProfile

# ------------------------------------------------------------------------------
# How far measured steps are from their estimate: nine of ten are within a factor of it.
#
# The factor is exp(1.645 s), s being a spread of the profile, computed from the errors on runs that
# were left out of its fit so that nine of ten are within (measure/calibrate/spread.py): `spread` where the
# cluster is one of those measured, else `spread_apart`. Each further respect in which a job is
# outside the runs of the fit multiplies s by the profile's `widening`; the plan reports it. A
# cluster with its own `spread` (`mpctl bench machine`) was measured by runs of mpctl: its device,
# and as many ranks as it has devices, then count as measured.
#
# By hand, a spread of 0.05: factor 1.09; with a widening of 1.5, at a dtype that the profile was
# never measured at: 1.13.


QUANTILE = 1.645  # of a normal distribution: a twentieth is above
BEYOND = 1.5  # times the largest seen that still count as seen


class Band(NamedTuple):
    """How far measured steps may be from an estimate.

    factor: nine of ten measured steps are between estimate / factor and estimate x factor.
    extrapolates: in words, each respect in which the job is outside the measured runs.
    """

    factor: float
    extrapolates: tuple[str, ...]


def find_band(layout: JobLayout, profile: RuntimeProfile, speed: Speed, network: float = 0.0) -> Band:
    """The band of a step's time, and each respect in which the job is outside the measured runs.

    network: what messages of unknown speed add to its spread (StepTimeModel.network_doubt).
    """
    job = layout.job
    spread, unknown = own_spread(job.cluster, profile), unknown_parts(job.cluster, profile)
    if spread is None:
        spread = max(profile.spread_apart, SPREAD) if unknown else profile.spread
        if layout.model.experts:
            spread = max(spread, profile.experts.spread)
    reasons = (*speed.notes, *beyond(job, layout.table, profile))
    spread = hypot(spread, network)
    here = [text for text in unknown if text not in reasons]
    factor = find_system(job.cluster, profile).factor
    shift = f"so all times are multiplied by {factor:g}, as is typical of systems never measured"
    half = exp(QUANTILE * spread * profile.widening ** len(reasons))
    return Band(half, (*here, *reasons, *[shift] * bool(unknown and factor != 1)))


def beyond(job: JobSpec, table: OperatorTable, profile: RuntimeProfile) -> Iterator[str]:
    """Yield each respect other than the cluster in which a job is outside the measured runs, in words.

    table: the operators of its model.
    """
    device, seen, dtype = job.cluster.device, profile.seen, job.training.dtype
    is_measured = own_spread(job.cluster, profile) is not None
    if device is not None and device.name not in seen.devices and not is_measured:
        yield f"{profile.name} was never measured on {device.name}"
    if job.training.adapter is not None and not profile.with_adapters:
        yield f"{profile.name} was never measured with adapters"
    if dtype not in seen.dtypes:
        yield f"{profile.name} was never measured at {dtype}"
    if (mode := job.parallel.tensor_mode) != "1d":
        yield f"tensor_mode {mode}: no run of it was measured"
    cluster, gpus = job.cluster, seen.gpus
    if is_measured:
        gpus = max(gpus, cluster.nodes * (cluster.cores or cluster.gpus_per_node or 1))
    if job.world_size > BEYOND * gpus:
        yield f"{plural(job.world_size, 'rank')}, and the largest run measured has {gpus:,}"
    if table.numel > BEYOND * seen.parameters:
        yield (
            f"{count_text(table.numel)} parameters, and the largest model measured has {count_text(seen.parameters)}"
        )


# ------------------------------------------------------------------------------
# The time of a step and its parts.


class StepPart(NamedTuple):
    """A part of a step's time.

    name: its field of StepTime and its key in JSON; meaning: what takes the time, in few words;
    formula: how it is computed; is_per_microbatch: whether every micro batch adds the same.
    """

    name: str
    meaning: str
    formula: str
    is_per_microbatch: bool = False


PARTS = (
    StepPart(
        "compute",
        "matrix products, attention and element-wise kernels",
        "micro batches x (matrix products, attention, other kernels) of the busiest stage",
        is_per_microbatch=True,
    ),
    StepPart(
        "tp",
        "messages of tensor parallelism",
        "micro batches x messages over tp that no computation hides, and those of once a step "
        "(gradient norm, partial gradients)",
    ),
    StepPart(
        "cp",
        "messages of context parallelism",
        "micro batches x keys and values sent over cp that attention does not hide",
        is_per_microbatch=True,
    ),
    StepPart(
        "ep",
        "messages of experts' ranks",
        "micro batches x rows sent to experts and back that no computation hides",
        is_per_microbatch=True,
    ),
    StepPart(
        "pp",
        "messages between stages",
        "what messages between stages add to the step, and sums over pp of once a step (shared "
        "parameters, gradient norm)",
    ),
    StepPart(
        "dp_cp",
        "gradients over the replicas that no computation hides",
        "gradients (with ZeRO also parameters and the gradient norm) sent over dp_cp that no computation hides",
    ),
    StepPart(
        "bubble", "waiting for other stages", "time that the busiest stage waits for other stages, their messages aside"
    ),
    StepPart(
        "optimizer",
        "reading and writing the optimizer's states",
        "parameters x bytes moved / (ranks that share them x memory bandwidth)",
    ),
    StepPart(
        "other",
        "launching kernels, where it takes longer than they do",
        "host time that kernels do not hide, work of once a step, and the status of all ranks",
    ),
    StepPart(
        "contention",
        "waiting for a core that another rank uses",
        "work of all ranks of a node / its cores, where that takes longer than the step of ranks that have a core each",
    ),
)


class StepTime(NamedTuple):
    """Seconds of one step on the busiest stage, by part (`PARTS`), and the FLOP for its rates.

    model_flops, hardware_flops: FLOP of a step, of a rank on the average, as arXiv 2104.04473 and
    2205.05198 count them (causal scores count in full); the hardware's include recomputation.
    peak: FLOP/s that the device states for the data type. band: the spread of measured errors.
    """

    compute: float
    tp: float
    cp: float
    pp: float
    dp_cp: float
    bubble: float
    optimizer: float
    other: float
    contention: float
    model_flops: float
    hardware_flops: float
    peak: float
    band: Band
    ep: float = 0.0

    def parts(self) -> dict[str, float]:
        """Seconds of each part by its name, in the order of `PARTS`; they sum to `total`. `ep` is
        left out where no rows are sent to experts."""
        found = {part.name: getattr(self, part.name) for part in PARTS}
        if not self.ep:
            del found["ep"]
        return found

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return (
            self.compute
            + self.tp
            + self.cp
            + self.pp
            + self.dp_cp
            + self.bubble
            + self.optimizer
            + self.other
            + self.contention
            + self.ep
        )

    @property
    def low(self) -> float:
        """Seconds: 9 of 10 measured steps are between `low` and `high`. No less than the device
        takes at its peak."""
        at_peak = self.hardware_flops / self.peak
        return max(self.total / self.band.factor, min(at_peak, self.total))

    @property
    def high(self) -> float:
        """Seconds: 9 of 10 measured steps are between `low` and `high`."""
        return self.total * self.band.factor

    @property
    def extrapolates(self) -> tuple[str, ...]:
        """Why the band may not hold here: the respects in which the job is outside the measured
        runs."""
        return self.band.extrapolates

    @property
    def mfu(self) -> float:
        """Model FLOP utilization: the model's FLOP/s as a share of the device's peak."""
        return self.model_flops / self.total / self.peak

    @property
    def hfu(self) -> float:
        """Hardware FLOP utilization: as `mfu`, with the FLOP of recomputation."""
        return self.hardware_flops / self.total / self.peak


# ------------------------------------------------------------------------------
# Seconds that messages sent once a step add to it: gradients, parameters, sums over tp and pp.
#
# Gradients overlap with the last backward, as far as the runtime does this and they fit into it.
# The parameters that ZeRO 1 and 2 gather afterwards overlap with the next step's first forward
# where the profile has a share for them (`overlap.gather`), else like gradients. Sums of equal
# slices at ZeRO 2 and 3 follow the scatters of each layer, and overlap as these do. Nothing hides
# the other messages.
#
# By hand, 3 s of gradients and 1 s of parameters, at most 0.8 of each hidden, during a backward of
# 2 s and a forward of 0.5 s: 2 s and 0.5 s are hidden, 1.5 s remain.


# The part of a step that messages over a group belong to; those over a grid belong to tp.
PART_OF_GROUP = {
    "tp": "tp",
    "etp": "tp",
    "pp": "pp",
    "world": "world",
    "ep": "ep",
    "etp_ep": "ep",
    **{group: "dp_cp" for replicas in ("dp_cp", "edp") for group in (replicas, *zero_groups(replicas))},
}


class ClosingTimes(NamedTuple):
    """Exposed seconds of a stage's messages once a step, by the part of the step that their group
    belongs to; tp: over any group of its grid."""

    dp_cp: float
    tp: float
    pp: float
    world: float
    ep: float = 0.0


def part_of_group(group: str) -> str:
    """The part of a step that messages over this group belong to; raises ValueError for a group
    that no part has."""
    if group in PART_OF_GROUP:
        return PART_OF_GROUP[group]
    if set(group.split("-")) <= {axis.name for axis in GRID_AXES}:
        return "tp"
    raise ValueError(f"group {group}: no part of a step has its messages")


def closing_times(
    messages: Iterable[Message], network: Network, overlap: OverlapShares, backward: float, forward: float
) -> ClosingTimes:
    """Exposed seconds of a stage's messages once a step, of which `backward` seconds of a last
    backward and `forward` seconds of a first forward may hide some; 0 where nothing may be
    hidden."""
    covered = gradients = parameters = 0.0
    rest = dict.fromkeys(ClosingTimes._fields, 0.0)
    for message in messages:
        seconds = network.seconds(message)
        if message.cover in ("last_backward", "last_layers"):
            covered += seconds
            if message.cover == "last_layers":
                gradients += overlap.zero * seconds
            elif message.what == "parameters" and overlap.gather is not None:
                parameters += overlap.gather * seconds
            else:
                gradients += overlap.dp * seconds
        else:
            rest[part_of_group(message.axis)] += seconds
    hidden = min(gradients, backward) + min(parameters, forward)
    rest["dp_cp"] += covered - hidden + overlap.drag * hidden
    return ClosingTimes(**rest)
