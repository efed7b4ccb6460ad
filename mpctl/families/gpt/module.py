"""GPT as a module: what the operator table beside it counts, with the same names and shapes.

h0 = drop(word[tokens] + position[0..s)); h = blocks(h0); logits = norm(h) word^T
(Radford et al. 2019, GPT-2: pre-norm, tied output; projections into the residual start smaller by
1/sqrt(2L)). The modern variant is the same with RMSNorm, rotary positions, a gated MLP, fewer kv
heads, no biases and a head of its own (Llama, arXiv 2302.13971). Names are global
(`layers.7.mlp.up.weight`), so that weights and dropout masks follow from the seed whatever the
layout.

Letters: b batch, s sequence, h hidden, v vocabulary; t tp, c cp.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mpctl.families.batch import Batch
from mpctl.kernels.cross_entropy import vocab_parallel_cross_entropy
from mpctl.kernels.embedding import OutputHead, VocabParallelEmbedding, tied_logits
from mpctl.kernels.group import Group
from mpctl.kernels.layer import NORMS, ParallelTransformerLayer, held_rows
from mpctl.kernels.masks import Places
from mpctl.kernels.mlp import Activation
from mpctl.kernels.noise import Noise
from mpctl.kernels.parameters import Init, Shard, mark_partial, shard_parameter
from mpctl.kernels.rotary import Rotary
from mpctl.sharding import padded_vocab
from mpctl.spec.model import Model
from mpctl.spec.training import Training


class PositionTable(nn.Module):
    """Learned absolute positions [max_positions, h], replicated."""

    def __init__(
        self, positions: int, hidden: int, *, init: Init, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        whole = Shard((positions, hidden))
        self.weight = shard_parameter(whole, init=init, dtype=dtype, device=device)

    def forward(self, rows: Places) -> Tensor:
        """[s, h] of the positions `rows`."""
        return self.weight[rows.start : rows.stop] if isinstance(rows, range) else self.weight[rows]


class Embedding(nn.Module):
    """tokens [b, s/c] -> [b, s/c, h], or this rank's [b, s/(ct), h] of it: word and position
    vectors, summed and dropped out."""

    def __init__(
        self, model: Model, training: Training, *, group: Group, cp: Group,
        sequence_parallel: bool, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        init = Init("normal", training.init_std)
        padded = padded_vocab(model.vocab, tp=group.size, divisor=model.vocab_divisor)
        self.dropout, self.group, self.cp = training.dropout, group, cp
        self.sequence_parallel = sequence_parallel
        self.word = VocabParallelEmbedding(
            model.vocab, model.hidden, group=group, padded_vocab=padded, init=init,
            sequence_parallel=sequence_parallel, dtype=dtype, device=device,
        )  # fmt: skip
        self.position = None
        if model.position == "learned":
            self.position = PositionTable(
                model.max_positions, model.hidden, init=init, dtype=dtype, device=device
            )
            if sequence_parallel:
                mark_partial(self.position)

    def forward(self, tokens: Tensor, noise: Noise | None) -> Tensor:
        hidden = self.word(tokens)
        rows = held_rows(
            hidden.shape[1], group=self.group, cp=self.cp,
            sequence_parallel=self.sequence_parallel, device=hidden.device,
        )  # fmt: skip
        if self.position is not None:
            hidden = hidden + self.position(rows)
        if noise is None:
            return hidden
        return noise.dropout(hidden, self.dropout, site="embedding", rows=rows)


class GPT(nn.Module):
    """One rank's share of the model: `group` splits its tensors, `cp` the sequence.

    forward gives logits [b, s/c, v_local] of this rank's words; `losses` gives [b, s/c] float32,
    equal on every rank of the group; `loss` is what training sums.
    """

    def __init__(
        self, model: Model, training: Training, *, group: Group, dtype: torch.dtype,
        device: torch.device, cp: Group | None = None, sequence_parallel: bool = False,
        layers: Iterable[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.group = model, group
        held = range(model.layers) if layers is None else layers
        cp = cp or Group(name="cp")
        parallel: dict[str, Any] = {"group": group, "cp": cp}
        parallel["sequence_parallel"] = sequence_parallel
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.embedding = Embedding(model, training, **parallel, **place)
        self.layers = nn.ModuleDict(
            {str(n): _block(model, training, n, parallel, place) for n in held}
        )
        self.final_norm = NORMS[model.norm](model.hidden, eps=model.norm_epsilon, **place)
        if sequence_parallel:
            mark_partial(self.final_norm)
        self.head = None
        if not model.tied_embeddings:
            self.head = OutputHead(
                model.vocab, model.hidden, group=group, init=Init("normal", training.init_std),
                padded_vocab=self.embedding.word.padded_vocab,
                sequence_parallel=sequence_parallel, **place,
            )  # fmt: skip

    def forward(self, tokens: Tensor, noise: Noise | None = None) -> Tensor:
        hidden = self.embedding(tokens, noise)
        for layer in self.layers.values():
            hidden = layer(hidden, noise)
        hidden = self.final_norm(hidden)
        return tied_logits(hidden, self.embedding.word) if self.head is None else self.head(hidden)

    def losses(self, tokens: Tensor, targets: Tensor, noise: Noise | None = None) -> Tensor:
        """-log p(target) of every token, [b, s/c]; the vocabulary is never gathered."""
        first = self.embedding.word.vocab_range.start
        logits = self(tokens, noise)
        return vocab_parallel_cross_entropy(logits, targets, group=self.group, first=first)

    def loss(self, batch: Batch, noise: Noise | None) -> Tensor:
        """Sum over the batch's samples of their mean loss (this rank's tokens of it), a scalar."""
        losses = self.losses(batch.tokens, batch.targets, noise)
        return losses.sum() * (1 / self.model.seq_length)


def _block(
    model: Model, training: Training, number: int, parallel: dict[str, Any], place: dict[str, Any]
) -> ParallelTransformerLayer:
    activation: Activation = model.activation
    rotary = None
    if model.position == "rotary":
        rotary = Rotary(model.head_size, model.rotary_base, model.rotary_scaling)
    return ParallelTransformerLayer(
        model.hidden, model.heads, model.ffn, site=f"layers.{number}", **parallel, **place,
        dropout=training.dropout, attention_dropout=training.attention_dropout,
        kv_heads=model.kv_heads, head_dim=model.head_size, activation=activation, rotary=rotary,
        bias=model.bias, norm=model.norm, eps=model.norm_epsilon, recompute=training.recompute,
        partition=training.partition_activations, offload=training.offload_activations,
        init_std=training.init_std, output_std=training.init_std / (2 * model.layers) ** 0.5,
    )  # fmt: skip
