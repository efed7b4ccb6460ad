"""The seam between a family and the runtime: where samples come from, what a module is fed, what
it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from mpctl.data.indexed import IndexedDataset
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.spec.model import ModelSpec


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
        self, dataset: IndexedDataset, model: ModelSpec, *, seed: int, special: Mapping[str, int],
        words: int, shuffle: bool = True,
    ) -> None:  # fmt: skip
        """special: ids of the family's special tokens. words: ids that text may use."""

    samples_per_epoch: int
    dataset: IndexedDataset

    def batch(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Arrays by name, each with the batch first; integers, or float64 weights."""


State = tuple[Tensor, ...]


class FamilyModule(nn.Module):
    """What one rank has of a model: all of it, or what a pipeline stage holds."""

    def advance(self, state: State, batch: Batch, noise: CounterRNG | None) -> State:
        """What the stage before gave, () for the first -> what the stage behind needs; of the last
        one the loss alone. `OperatorTable.boundary` names the dimensions in between.

        The loss is the sum over the batch's samples of their mean losses, of which training sums
        this rank's part; a scalar. noise None is no dropout.
        """
        raise NotImplementedError

    def forward(self, batch: Batch, noise: CounterRNG | None = None) -> Any:
        """Logits of this rank's words, [b, s/c, v_local], of a model in one stage."""
        raise NotImplementedError

    def loss(self, batch: Batch, noise: CounterRNG | None) -> Tensor:
        """Of a model in one stage."""
        (loss,) = self.advance((), batch, noise)
        return loss
