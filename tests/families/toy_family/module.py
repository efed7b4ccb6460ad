"""The toy family as a module, with the names and shapes of its operator table."""

from __future__ import annotations

from torch import Tensor

from mpctl.families.implementation import Batch
from mpctl.families.parts import SingleStackModule, weighted_sum
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.layers.shard_context import ShardContext
from mpctl.operators.table import StageSlice
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec


class Toy(SingleStackModule):
    """A batch has tokens, targets and weights [b, s/c]."""

    def __init__(
        self,
        model: ModelSpec,
        training: TrainingSpec,
        shard_context: ShardContext,
        stage_slice: StageSlice,
    ) -> None:
        tables = {"parity": 2}
        super().__init__(model, training, shard_context, stage_slice, tables=tables, causal=True)

    def embed(self, batch: Batch, rng: CounterRNG | None) -> Tensor:
        assert self.embedding is not None
        tokens = batch["tokens"]
        parity = (tokens * 0).add_(1).cumsum(1) % 2
        return self.embedding.dropped(self.embedding(tokens, parity=parity), rng)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.word_logits(hidden)

    def compute_loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        losses = self.word_losses(self.logits(hidden), batch["targets"])
        return weighted_sum(losses, batch["weights"])
