"""What a family's module is fed: one micro batch on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """tokens and targets [b, s/c], this rank's part of the sequence; samples [b], their global
    numbers, which the dropout masks follow."""

    tokens: Tensor
    targets: Tensor
    samples: Tensor
