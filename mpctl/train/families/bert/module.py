"""BERT as a module, with the same names and shapes of parameters as in its operator table (ops.py).

h0 = drop(norm(word + position + segment)); h = blocks(h0); logits = norm(act(h T)) word^T + bias;
next = tanh(h[0] P) N, of the first token alone (Devlin et al., arXiv 1810.04805, sections 3 and
3.1; the word head's transform is their released code's).

The first token lies on one rank of cp and, under sequence parallelism, on one of tp: that rank
alone computes what follows from it, and the sums over ranks that gradients and losses take anyway
do the rest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.model.families.bert.ops import CLASSES
from mpctl.model.operators.table import StageSlice
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.families.bert.samples import BertSamples
from mpctl.train.families.implementation import Batch, FamilyImplementation
from mpctl.train.families.parts import SingleStackModule, model_norm, padded, weighted_sum
from mpctl.train.kernels.activation import activation_of
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.layers.parameters import Init
from mpctl.train.layers.shard_context import ShardContext


class BERT(SingleStackModule):
    """A batch has tokens, types, targets and weights [b, s/c], and next [b]; the loss of a sample
    is the mean over its masked words plus the next-sentence loss."""

    IS_CAUSAL = False

    def __init__(
        self, model: ModelSpec, training: TrainingSpec, shard_context: ShardContext, *stage_slices: StageSlice
    ) -> None:
        super().__init__(model, training, shard_context, *stage_slices)
        is_post = model.norm_order == "post"
        if self.embedding is not None and self.has_entry:
            self.embedding.norm = model_norm(model, shard_context) if is_post else nn.Identity()
        if self.has_exit:
            h, init = model.hidden, Init("normal", training.init_std)
            self.transform = shard_context.replicated_linear(h, h, init=init)
            self.activation = activation_of(model.activation)
            self.transform_norm = model_norm(model, shard_context)
            self.head = self.head or nn.Module()
            self.head.bias = shard_context.word_bias(padded(model, shard_context.tp))
            self.pooler = shard_context.replicated_linear(h, h, init=init)
            self.next = shard_context.replicated_linear(h, CLASSES, init=init)

    def tables(self, model: ModelSpec) -> dict[str, int]:
        """Positions and segments."""
        return {"position": model.max_positions, "types": model.token_types}

    def embed(self, batch: Batch, rng: CounterRNG | None) -> Tensor:
        """[b, s/c, h] of tokens, positions and segments; post-norm models norm their sum."""
        assert self.embedding is not None
        hidden = self.embedding(batch["tokens"], position=None, types=batch["types"])
        return self.embedding.dropped(self.embedding.get_submodule("norm")(hidden), rng)

    def logits(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hidden states behind the last layer -> logits [b, s/c, v_local], padding behind the
        words, and, on the ranks that hold the first token, next-sentence logits [b, 2]."""
        assert self.head is not None
        hidden = self.final_norm(hidden)
        logits = self.word_logits(self.transform_norm(self.activation(self.transform(hidden))))
        logits = logits + self.head.get_parameter("bias")
        if not self.shard_context.holds_first_position:
            return logits, None
        # [b, s, h] -> [b, 1, h] -> [b, 2]
        return logits, self.next(torch.tanh(self.pooler(hidden[:, :1])))[:, 0]

    def without_padding(self, logits: tuple[Tensor, Tensor | None]) -> Any:
        """See SingleStackModule."""
        words, follows = logits
        return super().without_padding(words), follows

    def compute_loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The sum over samples of their masked-word loss and, on the ranks that hold the first
        token, of their next-sentence loss."""
        logits, follows = self.logits(hidden)
        losses = self.word_losses(logits, batch["targets"])
        total = weighted_sum(losses, batch["weights"])
        if follows is None:
            return total
        return total + F.cross_entropy(follows.to(losses.dtype), batch["next"], reduction="sum")


IMPLEMENTATION = FamilyImplementation(module=BERT, samples=BertSamples)
