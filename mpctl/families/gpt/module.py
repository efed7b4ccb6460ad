"""GPT as a module, with the same names and shapes of parameters as in its operator table (ops.py).

h0 = drop(word[tokens] + position[0..s)); h = blocks(h0); logits = norm(h) word^T
(Radford et al. 2019, GPT-2: pre-norm, tied output). The modern variant is the same with RMSNorm,
rotary positions, a gated MLP, fewer kv heads, no biases and a head of its own (Llama, arXiv
2302.13971). Names are global (`layers.7.mlp.up.weight`), so that weights and dropout masks follow
from the seed whatever the layout.
"""

from __future__ import annotations

from torch import Tensor

from mpctl.families.gpt.samples import GptSamples
from mpctl.families.implementation import Batch, FamilyImplementation
from mpctl.families.parts import SingleStackModule, model_norm
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.layers.shard_context import ShardContext
from mpctl.operators.table import StageSlice
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec


class GPT(SingleStackModule):
    """A batch has tokens and targets [b, s/c], and may have positions [b, s/c]; the loss of a
    sample is the mean over its tokens."""

    def __init__(
        self,
        model: ModelSpec,
        training: TrainingSpec,
        shard_context: ShardContext,
        stage_slice: StageSlice,
    ) -> None:
        super().__init__(model, training, shard_context, stage_slice)
        has_norm = stage_slice.has_entry and model.embedding_norm
        self.embedding_norm = model_norm(model, shard_context) if has_norm else None

    def tables(self, model: ModelSpec) -> dict[str, int]:
        """Learned positions, where the model has them."""
        return {"position": model.max_positions} if model.position == "learned" else {}

    def embed(self, batch: Batch, rng: CounterRNG | None) -> Tensor:
        """[b, s/c, h] of the tokens; a batch may give other positions than where they stand."""
        assert self.embedding is not None
        is_learned = self.model.position == "learned"
        rows = {"position": batch.fields.get("positions")} if is_learned else {}
        hidden = self.embedding(batch["tokens"], **rows)
        if self.model.embedding_multiplier is not None:
            hidden = hidden * self.model.embedding_multiplier
        if self.embedding_norm is not None:
            hidden = self.embedding_norm(hidden)
        return self.embedding.dropped(hidden, rng)

    def compute_loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The sum over samples of the mean loss of their tokens."""
        losses = self.word_losses(self.logits(hidden), batch["targets"])
        return losses.sum() * (1 / self.model.seq_length)


IMPLEMENTATION = FamilyImplementation(module=GPT, samples=GptSamples)
