"""How good predictions were: mean and worst error, order, and how often the band held.

    error = predicted / measured - 1        MAPE = mean of |error|        bias = mean of error

Spearman's rank correlation says whether the layouts come in the predicted order, which is what a
search relies on. Coverage is the share of layouts whose measured step lies within the plan's band;
a band is meant to hold nine of ten.

By hand, predicted 1.1, 1.8 and 4 s where 1, 2 and 4 s were measured: errors +10, -10 and 0 %, MAPE
6.7 %, bias 0 %, Spearman 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import StatisticsError, mean

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.calibrate.accuracy import LEAST_SWEEP, spearman


class Accuracy(TypedDict):
    """How good the predictions of some layouts were; every figure is None where none can be told.

    layouts: how many were compared; mape, bias, worst: shares, 0.1 for 10 %; worst: the error that
    is farthest from 0, of the layout worst_name; spearman: -1..1, of three layouts and more;
    coverage: the share of layouts whose measurement lies within the band of its prediction.
    """

    layouts: int
    mape: float | None
    bias: float | None
    worst: float | None
    worst_name: str | None
    spearman: float | None
    coverage: float | None


@dataclass(frozen=True, slots=True)
class HeldFigure:
    """A figure of one layout as it was predicted and as it was measured, both above 0.

    is_inside: whether the measurement lies within the prediction's band; None where it has none.
    """

    name: str
    predicted: float
    measured: float
    is_inside: bool | None = None

    @property
    def error(self) -> float:
        """By how much the prediction is too high, as a share of the measurement.

        >>> HeldFigure("tp2", predicted=3.0, measured=4.0).error
        -0.25
        """
        return self.predicted / self.measured - 1


NOTHING: Accuracy = {
    "layouts": 0, "mape": None, "bias": None, "worst": None, "worst_name": None,
    "spearman": None, "coverage": None,
}  # fmt: skip


def accuracy_of(comparisons: Sequence[HeldFigure]) -> Accuracy:
    """How good these predictions were, all together."""
    if not comparisons:
        return {**NOTHING}
    worst = max(comparisons, key=lambda each: abs(each.error))
    inside = [each.is_inside for each in comparisons if each.is_inside is not None]
    return {
        "layouts": len(comparisons),
        "mape": mean(abs(each.error) for each in comparisons),
        "bias": mean(each.error for each in comparisons),
        "worst": worst.error,
        "worst_name": worst.name,
        "spearman": _order([(each.predicted, each.measured) for each in comparisons]),
        "coverage": mean(inside) if inside else None,
    }


def _order(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's rank correlation; None where too few layouts, or equal figures, tell none."""
    if len(pairs) < LEAST_SWEEP:
        return None
    try:
        return spearman(pairs)
    except StatisticsError:
        return None
