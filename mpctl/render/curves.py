"""What terminal plots and pictures share: the words and units of axes, legends, round ticks.

>>> axis_of("tokens", [0, 327_680])
Axis(name='tokens', unit='thousands', size=1000.0)
>>> ticks(0, 20, 5)
[0, 5, 10, 15, 20]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mpctl.render.console import visible
from mpctl.runs.series import Series

LABELS = {
    "step": "step", "tokens": "tokens", "time": "time of training", "loss": "loss",
    "validation_loss": "validation loss", "learning_rate": "learning rate",
    "grad_norm": "gradient norm", "tokens_per_second": "tokens/s", "step_seconds": "step time",
    "cpu_seconds": "CPU time of a step, rank 0", "memory_bytes": "peak memory of the fullest rank",
    "loss_scale": "loss scale", "mfu": "MFU", "hfu": "HFU",
    "reserved_memory_bytes": "memory reserved by the allocator, rank 0",
}  # fmt: skip
# From what value on a unit is used, its name, and its size.
SECONDS = ((7200.0, "h", 3600.0), (120.0, "min", 60.0), (1.0, "s", 1.0), (0.0, "ms", 1e-3))
BYTES = ((2.0**40, "TiB", 2.0**40), (2.0**30, "GiB", 2.0**30), (0.0, "MiB", 2.0**20))
COUNTS = ((1e12, "trillions", 1e12), (1e9, "billions", 1e9), (1e6, "millions", 1e6),
          (1e4, "thousands", 1e3), (0.0, "", 1.0))  # fmt: skip
SHORT = 400  # points, beyond which the noise of single steps would hide a curve
ROUND = (1, 2, 5, 10)


@dataclass(frozen=True)
class PlotAxis:
    """An axis: what it shows, its unit in words (empty for plain numbers) and the unit's size."""

    name: str
    unit: str = ""
    size: float = 1.0

    @property
    def label(self) -> str:
        """The name and, in parentheses, the unit."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def scaled(self, values: Iterable[float]) -> list[float]:
        """The values in the axis's unit."""
        return [value / self.size for value in values]


def axis_of(metric: str, values: Iterable[float]) -> PlotAxis:
    """The axis of a metric, in the unit that suits the largest of the values."""
    most = max(map(abs, values), default=0.0)
    unit, size = next((unit, size) for bound, unit, size in _units(metric) if most >= bound)
    return PlotAxis(words(metric), unit, size)


def _units(metric: str) -> tuple[tuple[float, str, float], ...]:
    if metric == "time" or metric.endswith("_seconds"):
        return SECONDS
    if metric.endswith("_bytes"):
        return BYTES
    return COUNTS if metric in ("tokens", "tokens_per_second") else ((0.0, "", 1.0),)


def words(metric: str) -> str:
    """A metric in words: `validation_loss/old` -> `validation loss of old`. A metric without words
    of its own keeps its name.
    """
    base, slash, corpus = metric.partition("/")
    name = LABELS.get(base, base)
    return visible(f"{name} of {corpus}" if slash else name)


def y_axis(series: Sequence[Series]) -> PlotAxis:
    """The axis of several curves: the names of all metrics, and their unit where they share one."""
    metrics = list(dict.fromkeys(s.metric for s in series))
    names = list(dict.fromkeys(words(metric.partition("/")[0]) for metric in metrics))
    name = words(metrics[0]) if len(metrics) == 1 else ", ".join(names)
    if len({_units(metric) for metric in metrics}) > 1:
        return PlotAxis(name)
    axis = axis_of(metrics[0], (value for s in series for value in s.y))
    return PlotAxis(name, axis.unit, axis.size)


def legend(series: Sequence[Series]) -> list[str]:
    """A name for each curve: the run, the metric, or both, whichever tells the curves apart."""
    runs, metrics = {s.run for s in series}, {s.metric for s in series}
    if len(metrics) == 1:
        return [visible(s.run) for s in series]
    names = (words(s.metric) if len(runs) == 1 else f"{s.run}: {words(s.metric)}" for s in series)
    return [visible(name) for name in names]


def whose(series: Sequence[Series]) -> str:
    """Whose curves these are: `demo`, or `3 runs`."""
    runs = list(dict.fromkeys(s.run for s in series))
    return visible(runs[0]) if len(runs) == 1 else f"{len(runs)} runs"


def window(points: int) -> int:
    """The number of points that a curve is averaged over: 1, and of long curves a hundredth."""
    return 1 if points <= SHORT else points // 100


def mean(values: Sequence[float], count: int) -> list[float]:
    """Running mean of `count` neighbours, fewer at the ends.

    >>> mean([1, 2, 6], 3)
    [1.5, 3.0, 4.0]
    """
    sums, before, after = [0.0, *accumulate(values)], count // 2, (count + 1) // 2
    spans = ((max(0, i - before), min(len(values), i + after)) for i in range(len(values)))
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in spans]


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from low to high, both of which they do not exceed."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in ROUND if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    found = [number * step for number in range(first, last + 1)]
    return [int(v) if step >= 1 and step == int(step) else v for v in found] or [low]
