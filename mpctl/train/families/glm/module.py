"""GLM as a module: GPT's stack that sees part A both ways, with a second position a token.

h0 = drop(word + position[place in the corrupted text] + block[place inside the blank]); the first
`context` tokens of a sample are seen by all, the rest by later ones only (Du et al., arXiv
2103.10360, sections 2.2 and 2.3).
"""

from __future__ import annotations

from torch import Tensor

from mpctl.spec.model import ModelSpec
from mpctl.train.families.glm.samples import GlmSamples
from mpctl.train.families.implementation import Batch, FamilyImplementation
from mpctl.train.families.parts import SingleStackModule, weighted_sum
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.kernels.masks import partly_bidirectional_mask


class GLM(SingleStackModule):
    """A batch has tokens, positions, blocks, targets and weights [b, s/c], and context [b], the
    number of tokens of part A; the loss of a sample is the mean over the words of its blanks."""

    IS_CAUSAL = False

    def tables(self, model: ModelSpec) -> dict[str, int]:
        """Two positions: in the corrupted text and inside the blank."""
        return dict.fromkeys(("position", "block"), model.max_positions)

    def embed(self, batch: Batch, rng: CounterRNG | None) -> Tensor:
        """[b, s/c, h] of tokens with both of their positions."""
        assert self.embedding is not None
        hidden = self.embedding(batch["tokens"], position=batch["positions"], block=batch["blocks"])
        return self.embedding.dropped(hidden, rng)

    def layer_kwargs(self, batch: Batch) -> dict[str, Tensor]:
        """mask [b, 1, s/c, s]: what this rank's tokens may attend to."""
        context, shard_context = batch["context"], self.shard_context
        length = batch["tokens"].shape[1] * shard_context.cp.size
        rows = shard_context.query_rows(length, context.device)
        return {"mask": partly_bidirectional_mask(context, length, queries=rows)}

    def compute_loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The sum over samples of the mean loss of the words of their blanks."""
        losses = self.head_losses(self.final_norm(hidden), batch["targets"])
        return weighted_sum(losses, batch["weights"])


IMPLEMENTATION = FamilyImplementation(module=GLM, samples=GlmSamples)
