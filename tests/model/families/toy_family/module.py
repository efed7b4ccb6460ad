"""The toy family as a module, with the names and shapes of its operator table."""

from __future__ import annotations

from torch import Tensor

from mpctl.spec.model import ModelSpec
from mpctl.train.families.implementation import Batch, FamilyImplementation
from mpctl.train.families.parts import SingleStackModule, weighted_sum
from mpctl.train.kernels.counter_rng import CounterRNG

from .samples import ToySamples


class Toy(SingleStackModule):
    """A batch has tokens, targets and weights [b, s/c]."""

    HAS_FINAL_NORM = False

    def tables(self, model: ModelSpec) -> dict[str, int]:
        return {"parity": 2}

    def embed(self, batch: Batch, rng: CounterRNG | None) -> Tensor:
        assert self.embedding is not None
        tokens = batch["tokens"]
        parity = (tokens * 0).add_(1).cumsum(1) % 2
        return self.embedding.dropped(self.embedding(tokens, parity=parity), rng)

    def compute_loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        losses = self.word_losses(self.logits(hidden), batch["targets"])
        return weighted_sum(losses, batch["weights"])


IMPLEMENTATION = FamilyImplementation(module=Toy, samples=ToySamples)
