"""BERT as a module: what the operator table beside it counts, with the same names and shapes.

h0 = drop(norm(word + position + segment)); h = blocks(h0); logits = norm(act(h T)) word^T + bias;
next = tanh(h[0] P) N, of the first token alone (Devlin et al., arXiv 1810.04805, sections 3 and
3.1; the word head's transform is their released code's). The loss of a sample is the mean over its
masked words plus the next-sentence loss.

The first token lies on one rank of cp and, under sequence parallelism, on one of tp: that rank
alone computes what follows from it, and the sums over ranks that gradients and losses take anyway
do the rest. Letters: b batch, s sequence, h hidden, v vocabulary; t tp, c cp.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.families.batch import Batch, Family
from mpctl.families.bert.ops import CLASSES
from mpctl.families.parts import (
    Embedding,
    WholeLinear,
    encoder_layers,
    own_head,
    padded,
    weighted_sum,
)
from mpctl.kernels.cross_entropy import vocab_parallel_cross_entropy
from mpctl.kernels.embedding import tied_logits
from mpctl.kernels.group import Group
from mpctl.kernels.layer import NORMS
from mpctl.kernels.mlp import activation_of
from mpctl.kernels.noise import Noise
from mpctl.kernels.parameters import ZEROS, Init, Shard, mark_partial, shard_parameter
from mpctl.sharding import local_range
from mpctl.spec.model import Model
from mpctl.spec.training import Training


class BERT(Family):
    """One rank's share of the model: `group` splits its tensors, `cp` the sequence.

    forward gives logits [b, s/c, v_local] of this rank's words and, where the first token is,
    next-sentence logits [b, 2], else None.
    """

    def __init__(
        self, model: Model, training: Training, *, group: Group, dtype: torch.dtype,
        device: torch.device, cp: Group | None = None, sequence_parallel: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.group, self.cp = model, group, cp or Group(name="cp")
        self.has_first_token = self.cp.rank == 0 and not (sequence_parallel and group.rank)
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        split: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel, **place}
        tables = {"position": model.max_positions, "types": model.token_types}
        self.embedding = Embedding(model, training, cp=self.cp, tables=tables, **split)
        self.layers = encoder_layers(
            model, training, cp=self.cp, causal=False, order=model.norm_order, **split
        )
        norm, eps, init = NORMS[model.norm], model.norm_epsilon, Init("normal", training.init_std)
        is_post = model.norm_order == "post"
        made: nn.Module = norm(model.hidden, eps=eps, **place)
        self.embedding.norm = made if is_post else nn.Identity()
        self.final_norm = nn.Identity() if is_post else made
        self.transform = WholeLinear(model.hidden, model.hidden, init=init, **place)
        self.activation = activation_of(model.activation)
        self.transform_norm = norm(model.hidden, eps=eps, **place)
        self.head: nn.Module = own_head(model, training, **split) or nn.Module()
        self.head.bias = _word_bias(model, group, **place)
        self.pooler = WholeLinear(model.hidden, model.hidden, init=init, **place)
        self.next = WholeLinear(model.hidden, CLASSES, init=init, **place)
        if sequence_parallel:
            for end in (made, self.transform, self.transform_norm, self.pooler, self.next):
                mark_partial(end)

    def forward(
        self, tokens: Tensor, types: Tensor, noise: Noise | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """tokens, types [b, s/c]: this rank's part of them."""
        hidden = self.embedding(tokens, position=None, types=types)
        hidden = self.embedding.dropped(self.embedding.get_submodule("norm")(hidden), noise)
        for layer in self.layers.values():
            hidden = layer(hidden, noise)
        hidden = self.final_norm(hidden)
        return self._words(hidden), self._next(hidden) if self.has_first_token else None

    def _words(self, hidden: Tensor) -> Tensor:
        features = self.transform_norm(self.activation(self.transform(hidden)))
        is_tied = self.model.tied_embeddings
        logits = tied_logits(features, self.embedding.word) if is_tied else self.head(features)
        bias: Tensor = self.head.get_parameter("bias")
        return logits + bias[: logits.shape[-1]]

    def _next(self, hidden: Tensor) -> Tensor:
        # [b, s, h] -> [b, 1, h] -> [b, 2]
        logits: Tensor = self.next(torch.tanh(self.pooler(hidden[:, :1])))
        return logits[:, 0]

    def loss(self, batch: Batch, noise: Noise | None) -> Tensor:
        logits, follows = self(batch["tokens"], batch["types"], noise)
        first = self.embedding.word.vocab_range.start
        losses = vocab_parallel_cross_entropy(
            logits, batch["targets"], group=self.group, first=first
        )
        total = weighted_sum(losses, batch["weights"])
        if follows is None:
            return total
        return total + F.cross_entropy(follows.to(losses.dtype), batch["next"], reduction="sum")


def _word_bias(model: Model, group: Group, **place: Any) -> nn.Parameter:
    """[v/t], of this rank's words."""
    rows = padded(model, group)
    own = local_range(rows, parts=group.size, index=group.rank)
    return shard_parameter(Shard((rows,), 0, (own,)), init=ZEROS, **place)
