"""One number of an estimate with the formula that gave it: what `mpctl plan --explain` prints.

By hand, the gradients of 10 parameters: Figure("memory.stage-0.gradients", 40, "B",
"parameters x bytes", "10 x 4").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["B", "s", "FLOP", "FLOP/s", "B/s", "", "%"]


@dataclass(frozen=True, slots=True)
class Figure:
    """name: dotted, `memory.stage-0.activations`; formula: in words and letters; numbers: the same
    with what stands for them here; source: the paper, datasheet or fit behind the formula."""

    name: str
    value: float
    unit: Unit
    formula: str
    numbers: str
    source: str = ""
