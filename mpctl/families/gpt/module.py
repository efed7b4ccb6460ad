"""GPT as a module: what the operator table beside it counts, with the same names and shapes.

h0 = drop(word[tokens] + position[0..s)); h = blocks(h0); logits = norm(h) word^T
(Radford et al. 2019, GPT-2: pre-norm, tied output). The modern variant is the same with RMSNorm,
rotary positions, a gated MLP, fewer kv heads, no biases and a head of its own (Llama, arXiv
2302.13971). Names are global (`layers.7.mlp.up.weight`), so that weights and dropout masks follow
from the seed whatever the layout.
"""

from __future__ import annotations

from torch import Tensor

from mpctl.families.batch import Batch
from mpctl.families.parts import ShardContext, SingleStackModule, norm_of
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.operators.table import StageSlice
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec


class GPT(SingleStackModule):
    """Fed tokens and targets [b, s/c]; the loss of a sample is the mean over its tokens. Tokens
    may have other positions [b, s/c] than where they stand in the batch."""

    def __init__(
        self, model: ModelSpec, training: TrainingSpec, place: ShardContext, held: StageSlice
    ) -> None:
        tables = {"position": model.max_positions} if model.position == "learned" else {}
        super().__init__(model, training, place, held, tables=tables, causal=True)
        self.final_norm = norm_of(model, place) if held.has_exit else None

    def entered(self, batch: Batch, noise: CounterRNG | None) -> Tensor:
        assert self.embedding is not None
        learned = self.model.position == "learned"
        places = {"position": batch.fields.get("positions")} if learned else {}
        hidden = self.embedding(batch["tokens"], **places)
        return self.embedding.dropped(hidden, noise)

    def logits(self, hidden: Tensor) -> Tensor:
        """Behind the last layer -> [b, s/c, v_local]."""
        assert self.final_norm is not None
        return self.words(self.final_norm(hidden))

    def left(self, hidden: Tensor, batch: Batch) -> Tensor:
        losses = self.losses(self.logits(hidden), batch["targets"])
        return losses.sum() * (1 / self.model.seq_length)
