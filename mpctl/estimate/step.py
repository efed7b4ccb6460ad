"""The time of a step as a value: its parts, its band, the FLOP that it is measured by."""

from __future__ import annotations

from dataclasses import dataclass

from mpctl.estimate.band import Band


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step, by part: of the busiest stage. low, high: where nine of ten measured
    ones lie; extrapolates: why they may not. FLOP: of a rank on the average, as arXiv 2104.04473
    and 2205.05198 count them, causal scores whole; hardware's with what is computed again."""

    compute: float
    tp: float
    cp: float
    pp: float
    dp: float
    bubble: float
    optimizer: float
    other: float
    model_flops: float
    hardware_flops: float
    peak: float
    band: Band

    @property
    def total(self) -> float:
        return (self.compute + self.tp + self.cp + self.pp + self.dp + self.bubble
                + self.optimizer + self.other)  # fmt: skip

    @property
    def low(self) -> float:
        return self.total / self.band.factor

    @property
    def high(self) -> float:
        return self.total * self.band.factor

    @property
    def extrapolates(self) -> tuple[str, ...]:
        return self.band.extrapolates

    @property
    def flops_per_rank(self) -> float:
        return self.hardware_flops

    @property
    def mfu(self) -> float:
        return self.model_flops / self.total / self.peak

    @property
    def hfu(self) -> float:
        return self.hardware_flops / self.total / self.peak
