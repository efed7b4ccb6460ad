"""GPT as a module: what the operator table beside it counts, with the same names and shapes.

h0 = drop(word[tokens] + position[0..s)); h = blocks(h0); logits = norm(h) word^T
(Radford et al. 2019, GPT-2: pre-norm, tied output; projections into the residual start smaller by
1/sqrt(2L)). Names are global (`layers.7.mlp.up.weight`), so that weights and dropout masks follow
from the seed whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mpctl.kernels.cross_entropy import vocab_parallel_cross_entropy
from mpctl.kernels.embedding import OutputHead, VocabParallelEmbedding, tied_logits
from mpctl.kernels.group import Group
from mpctl.kernels.layer import ParallelTransformerLayer
from mpctl.kernels.noise import Noise
from mpctl.kernels.norm import LayerNorm
from mpctl.kernels.parameters import Init, Shard, shard_parameter
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

    def forward(self, length: int) -> Tensor:
        return self.weight[:length]  # [s, h]


class Embedding(nn.Module):
    """tokens [b, s] -> [b, s, h]: word and position vectors, summed and dropped out."""

    def __init__(
        self, model: Model, training: Training, *, group: Group, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        init = Init("normal", training.init_std)
        padded = padded_vocab(model.vocab, tp=group.size, divisor=model.vocab_divisor)
        self.dropout = training.dropout
        self.word = VocabParallelEmbedding(
            model.vocab, model.hidden, group=group, padded_vocab=padded, init=init,
            dtype=dtype, device=device,
        )  # fmt: skip
        self.position = PositionTable(
            model.max_positions, model.hidden, init=init, dtype=dtype, device=device
        )

    def forward(self, tokens: Tensor, noise: Noise | None) -> Tensor:
        hidden = self.word(tokens) + self.position(tokens.shape[1])
        return hidden if noise is None else noise.dropout(hidden, self.dropout, site="embedding")


class GPT(nn.Module):
    """One rank's share of the model; `group` is its tensor-parallel group.

    forward gives logits [b, s, v_local] of this rank's words; `losses` gives [b, s] float32, equal
    on every rank of the group.
    """

    def __init__(
        self, model: Model, training: Training, *, group: Group, dtype: torch.dtype,
        device: torch.device, layers: Iterable[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.group = model, group
        held = range(model.layers) if layers is None else layers
        self.embedding = Embedding(model, training, group=group, dtype=dtype, device=device)
        self.layers = nn.ModuleDict(
            {str(number): _block(model, training, number, group, dtype, device) for number in held}
        )
        self.final_norm = LayerNorm(
            model.hidden, eps=model.norm_epsilon, dtype=dtype, device=device
        )
        self.head = None
        if not model.tied_embeddings:
            word = self.embedding.word
            self.head = OutputHead(
                model.vocab, model.hidden, group=group, padded_vocab=word.padded_vocab,
                init=Init("normal", training.init_std), dtype=dtype, device=device,
            )  # fmt: skip

    def forward(self, tokens: Tensor, noise: Noise | None = None) -> Tensor:
        hidden = self.embedding(tokens, noise)
        for layer in self.layers.values():
            hidden = layer(hidden, noise)
        hidden = self.final_norm(hidden)
        return tied_logits(hidden, self.embedding.word) if self.head is None else self.head(hidden)

    def losses(self, tokens: Tensor, targets: Tensor, noise: Noise | None = None) -> Tensor:
        """-log p(target) of every token, [b, s]; the vocabulary is never gathered."""
        first = self.embedding.word.vocab_range.start
        logits = self(tokens, noise)
        return vocab_parallel_cross_entropy(logits, targets, group=self.group, first=first)


def _block(
    model: Model, training: Training, number: int, group: Group, dtype: torch.dtype,
    device: torch.device,
) -> ParallelTransformerLayer:  # fmt: skip
    assert model.activation in ("gelu", "gelu_tanh", "relu"), model.activation
    return ParallelTransformerLayer(
        model.hidden, model.heads, model.ffn, group=group, site=f"layers.{number}",
        dropout=training.dropout, attention_dropout=training.attention_dropout,
        kv_heads=model.kv_heads, head_dim=model.head_size, activation=model.activation,
        bias=model.bias, eps=model.norm_epsilon, init_std=training.init_std,
        output_std=training.init_std / (2 * model.layers) ** 0.5, dtype=dtype, device=device,
    )  # fmt: skip
