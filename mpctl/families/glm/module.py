"""GLM as a module: GPT's stack that sees part A both ways, with a second position a token.

h0 = drop(word + position[place in the corrupted text] + block[place inside the blank]); the first
`context` tokens of a sample are seen by all, the rest by later ones only (Du et al., arXiv
2103.10360, sections 2.2 and 2.3).
"""

from __future__ import annotations

from torch import Tensor

from mpctl.families.batch import Batch
from mpctl.families.parts import ShardContext, SingleStackModule, norm_of, weighted_sum
from mpctl.kernels.context import context_positions
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.masks import partly_bidirectional_mask
from mpctl.operators.table import StageSlice
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec


class GLM(SingleStackModule):
    """Fed tokens, positions, blocks, targets and weights [b, s/c], and context [b], the tokens of
    part A; the loss of a sample is the mean over the words of its blanks."""

    def __init__(
        self, model: ModelSpec, training: TrainingSpec, place: ShardContext, held: StageSlice
    ) -> None:
        tables = dict.fromkeys(("position", "block"), model.max_positions)
        super().__init__(model, training, place, held, tables=tables, causal=False)
        self.final_norm = norm_of(model, place) if held.has_exit else None

    def entered(self, batch: Batch, noise: CounterRNG | None) -> Tensor:
        assert self.embedding is not None
        hidden = self.embedding(batch["tokens"], position=batch["positions"], block=batch["blocks"])
        return self.embedding.dropped(hidden, noise)

    def beside(self, batch: Batch) -> dict[str, Tensor]:
        """mask [b, 1, s/c, s]: what this rank's tokens may attend to."""
        context, cp = batch["context"], self.place.cp
        length = batch["tokens"].shape[1] * cp.size
        rows = context_positions(length, cp.size, cp.rank, device=context.device)
        return {"mask": partly_bidirectional_mask(context, length, queries=rows)}

    def logits(self, hidden: Tensor) -> Tensor:
        """Behind the last layer -> [b, s/c, v_local]."""
        assert self.final_norm is not None
        return self.words(self.final_norm(hidden))

    def left(self, hidden: Tensor, batch: Batch) -> Tensor:
        return weighted_sum(self.losses(self.logits(hidden), batch["targets"]), batch["weights"])
