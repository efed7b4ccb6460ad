"""The toy family as a module, with the names and shapes of its operator table."""

from __future__ import annotations

from torch import Tensor

from mpctl.families.batch import Batch
from mpctl.families.parts import ShardContext, SingleStackModule, weighted_sum
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.operators.table import StageSlice
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec


class Toy(SingleStackModule):
    """Fed tokens, targets and weights [b, s/c]."""

    def __init__(
        self, model: ModelSpec, training: TrainingSpec, place: ShardContext, held: StageSlice
    ) -> None:
        super().__init__(model, training, place, held, tables={"parity": 2}, causal=True)

    def entered(self, batch: Batch, noise: CounterRNG | None) -> Tensor:
        assert self.embedding is not None
        tokens = batch["tokens"]
        parity = (tokens * 0).add_(1).cumsum(1) % 2
        return self.embedding.dropped(self.embedding(tokens, parity=parity), noise)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.words(hidden)

    def left(self, hidden: Tensor, batch: Batch) -> Tensor:
        return weighted_sum(self.losses(self.logits(hidden), batch["targets"]), batch["weights"])
