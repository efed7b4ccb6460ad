"""The seam between a family and the runtime: where samples come from, what a module is fed, what
it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from mpctl.data.indexed import IndexedDataset
from mpctl.kernels.noise import Noise
from mpctl.spec.model import Model


@dataclass(frozen=True)
class Batch:
    """samples [b]: global numbers, which the dropout masks follow. fields: the arrays that the
    family's `Samples` made, by name; of [b, s] ones this rank's part of the sequence, [b, s/c]."""

    samples: Tensor
    fields: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]


class Objective(Protocol):
    """Endless samples: a function of (seed, number) alone."""

    def __init__(
        self, dataset: IndexedDataset, model: Model, *, seed: int, special: Mapping[str, int],
        words: int, shuffle: bool = True,
    ) -> None:  # fmt: skip
        """special: ids of the family's special tokens. words: ids that text may use."""

    samples_per_epoch: int
    dataset: IndexedDataset

    def batch(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Arrays by name, each with the batch first; integers, or float64 weights."""


class Family(nn.Module):
    """One rank's share of a model."""

    def loss(self, batch: Batch, noise: Noise | None) -> Tensor:
        """The sum over the batch's samples of their mean losses, of which training sums this
        rank's part; a scalar. None is no dropout."""
        raise NotImplementedError
