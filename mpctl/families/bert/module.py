"""BERT as a module: what the operator table beside it counts, with the same names and shapes.

h0 = drop(norm(word + position + segment)); h = blocks(h0); logits = norm(act(h T)) word^T + bias;
next = tanh(h[0] P) N, of the first token alone (Devlin et al., arXiv 1810.04805, sections 3 and
3.1; the word head's transform is their released code's).

The first token lies on one rank of cp and, under sequence parallelism, on one of tp: that rank
alone computes what follows from it, and the sums over ranks that gradients and losses take anyway
do the rest.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.families.batch import Batch
from mpctl.families.bert.ops import CLASSES
from mpctl.families.parts import (
    ReplicatedLinear,
    ShardContext,
    SingleStackModule,
    norm_of,
    padded,
    weighted_sum,
)
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.mlp import activation_of
from mpctl.kernels.parameters import ZEROS, Init, Shard, shard_parameter
from mpctl.operators.table import StageSlice
from mpctl.sharding import local_range
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec


class BERT(SingleStackModule):
    """Fed tokens, types, targets and weights [b, s/c], and next [b]; the loss of a sample is the
    mean over its masked words plus the next-sentence loss."""

    def __init__(
        self, model: ModelSpec, training: TrainingSpec, place: ShardContext, held: StageSlice
    ) -> None:
        tables = {"position": model.max_positions, "types": model.token_types}
        super().__init__(model, training, place, held, tables=tables, causal=False,
                         order=model.norm_order)  # fmt: skip
        is_post = model.norm_order == "post"
        if self.embedding is not None and held.has_entry:
            self.embedding.norm = norm_of(model, place) if is_post else nn.Identity()
        if held.has_exit:
            self._build_heads(model, training, place)
            self.final_norm = nn.Identity() if is_post else norm_of(model, place)

    def _build_heads(self, model: ModelSpec, training: TrainingSpec, place: ShardContext) -> None:
        init, h = Init("normal", training.init_std), model.hidden
        self.transform = ReplicatedLinear(h, h, place, init=init)
        self.activation = activation_of(model.activation)
        self.transform_norm = norm_of(model, place)
        self.head = self.head or nn.Module()
        self.head.bias = _word_bias(model, place)
        self.pooler = ReplicatedLinear(h, h, place, init=init)
        self.next = ReplicatedLinear(h, CLASSES, place, init=init)

    def entered(self, batch: Batch, noise: CounterRNG | None) -> Tensor:
        assert self.embedding is not None
        hidden = self.embedding(batch["tokens"], position=None, types=batch["types"])
        return self.embedding.dropped(self.embedding.get_submodule("norm")(hidden), noise)

    def logits(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Behind the last layer -> [b, s/c, v_local] of this rank's words and, where the first
        token is, next-sentence logits [b, 2]."""
        assert self.head is not None
        hidden = self.final_norm(hidden)
        logits = self.words(self.transform_norm(self.activation(self.transform(hidden))))
        bias = self.head.get_parameter("bias")
        has_first = self.place.cp.rank == 0
        has_first &= not (self.place.sequence_parallel and self.place.group.rank)
        return logits + bias[: logits.shape[-1]], self._next(hidden) if has_first else None

    def _next(self, hidden: Tensor) -> Tensor:
        # [b, s, h] -> [b, 1, h] -> [b, 2]
        logits: Tensor = self.next(torch.tanh(self.pooler(hidden[:, :1])))
        return logits[:, 0]

    def left(self, hidden: Tensor, batch: Batch) -> Tensor:
        logits, follows = self.logits(hidden)
        losses = self.losses(logits, batch["targets"])
        total = weighted_sum(losses, batch["weights"])
        if follows is None:
            return total
        return total + F.cross_entropy(follows.to(losses.dtype), batch["next"], reduction="sum")


def _word_bias(model: ModelSpec, place: ShardContext) -> nn.Parameter:
    """[v/t], of this rank's words."""
    rows = padded(model, place.group)
    own = local_range(rows, parts=place.group.size, index=place.group.rank)
    return shard_parameter(Shard((rows,), 0, (own,)), init=ZEROS, **place.of_tensors)
