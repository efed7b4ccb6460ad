"""The time of one training step as a value: its parts, its band, and the FLOP it is judged by.

The parts are named and ordered here alone: documents, comparisons, batch answers, explanations and
pictures all read `PARTS` and `StepTime.parts()`.

By hand, 4 s of compute, 1 s of tp messages and 1 s of bubble are a step of 6 s; of a rank that does
3e14 model FLOP in it, with a peak of 1e14 FLOP/s, the MFU is 3e14 / 6 / 1e14 = 50 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mpctl.estimate.band import Band


class StepPart(NamedTuple):
    """A part of a step's time.

    name: its field of StepTime and its key in JSON; meaning: what the time goes to, in few words;
    formula: what it is computed from; is_per_microbatch: whether every micro batch adds the same.
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
        "pp",
        "messages between stages",
        "what messages between stages add to the step, and sums over pp of once a step (shared "
        "parameters, gradient norm)",
    ),
    StepPart(
        "dp_cp",
        "gradients over the replicas that no computation hides",
        "gradients (with ZeRO also parameters and the gradient norm) sent over dp_cp that no "
        "computation hides",
    ),
    StepPart(
        "bubble",
        "waiting for other stages",
        "time that the busiest stage waits for other stages, their messages aside",
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
        "work of all ranks of a node / its cores, where that takes longer than the step of ranks "
        "that have a core each",
    ),
)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step on the busiest stage, by part (`PARTS`), and what rates follow from.

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

    def parts(self) -> dict[str, float]:
        """Seconds of each part by its name, in the order of `PARTS`; they sum to `total`."""
        return {part.name: getattr(self, part.name) for part in PARTS}

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return (self.compute + self.tp + self.cp + self.pp + self.dp_cp + self.bubble
                + self.optimizer + self.other + self.contention)  # fmt: skip

    @property
    def low(self) -> float:
        """Seconds: 9 of 10 measured steps lie between `low` and `high`. No less than the device
        takes at its peak."""
        at_peak = self.hardware_flops / self.peak
        return max(self.total / self.band.factor, min(at_peak, self.total))

    @property
    def high(self) -> float:
        """Seconds: 9 of 10 measured steps lie between `low` and `high`."""
        return self.total * self.band.factor

    @property
    def extrapolates(self) -> tuple[str, ...]:
        """Why the band may not hold here: in what the job lies outside of what was measured."""
        return self.band.extrapolates

    @property
    def mfu(self) -> float:
        """Model FLOP utilization: the model's FLOP/s as a share of the device's peak."""
        return self.model_flops / self.total / self.peak

    @property
    def hfu(self) -> float:
        """Hardware FLOP utilization: as `mfu`, with the FLOP of recomputation."""
        return self.hardware_flops / self.total / self.peak
