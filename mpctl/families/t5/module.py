"""T5 as a module: what the operator table beside it counts, with the same names and shapes.

y = norm(encoder(word[tokens])), z = norm(decoder(word[decoder tokens], y)); every layer of a stack
adds the stack's relative bias to its self-attention's scores, which are not divided by sqrt(d). A
tied table gives logits z word^T / sqrt(h), and words start with a standard deviation of 1 (Raffel
et al., arXiv 1910.10683, section 2.1; the scales are their released code's). T5 1.1: a gated MLP
and a head of its own. The loss of a sample is the mean over its targets.

Letters: b batch, s encoder positions, q decoder positions, h hidden, v vocabulary; t tp, c cp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mpctl.families.batch import Batch, Family
from mpctl.families.parts import (
    Embedding,
    encoder_layers,
    layer_settings,
    own_head,
    weighted_sum,
)
from mpctl.kernels.context import context_positions
from mpctl.kernels.cross_entropy import vocab_parallel_cross_entropy
from mpctl.kernels.decoder_layer import ParallelDecoderLayer
from mpctl.kernels.embedding import tied_logits
from mpctl.kernels.group import Group
from mpctl.kernels.layer import NORMS
from mpctl.kernels.noise import Noise
from mpctl.kernels.parameters import mark_partial
from mpctl.kernels.relative import RelativeBias
from mpctl.spec.model import Model
from mpctl.spec.training import Training

UNSCALED, WORD_STD = 1.0, 1.0


class _Stack(nn.Module):
    """Layers with the relative bias before and the norm behind them."""

    def __init__(
        self, model: Model, training: Training, layers: nn.ModuleDict, *, bidirectional: bool,
        group: Group, cp: Group, sequence_parallel: bool, **place: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.cp, self.layers = cp, layers
        self.position = RelativeBias(
            model.relative_buckets, model.relative_max_distance, model.heads, group=group,
            bidirectional=bidirectional, init_std=training.init_std, **place,
        )  # fmt: skip
        self.final_norm = NORMS[model.norm](model.hidden, eps=model.norm_epsilon, **place)
        if sequence_parallel:
            mark_partial(self.final_norm)

    def forward(self, hidden: Tensor, length: int, *args: Any) -> Tensor:
        """length: of the whole sequence; args: the context of a decoder, and the noise."""
        cp = self.cp
        rows = context_positions(length, cp.size, cp.rank, device=hidden.device)
        bias = self.position.at(rows, range(length))
        for layer in self.layers.values():
            hidden = layer(hidden, *args, bias=bias)
        normed: Tensor = self.final_norm(hidden)
        return normed


class T5(Family):
    """One rank's share of the model: `group` splits its tensors, `cp` both sequences.

    forward gives logits [b, q/c, v_local] of this rank's words.
    """

    def __init__(
        self, model: Model, training: Training, *, group: Group, dtype: torch.dtype,
        device: torch.device, cp: Group | None = None, sequence_parallel: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.group, self.cp = model, group, cp or Group(name="cp")
        split: dict[str, Any] = {
            "group": group, "sequence_parallel": sequence_parallel, "dtype": dtype,
            "device": device,
        }  # fmt: skip
        whole: dict[str, Any] = {**split, "cp": self.cp}
        self.embedding = Embedding(model, training, tables={}, word_std=WORD_STD, **whole)
        encoder = encoder_layers(
            model, training, prefix="encoder.layers", causal=False, scale=UNSCALED, **whole
        )
        decoder = _decoder_layers(model, training, **whole)
        self.encoder = _Stack(model, training, encoder, bidirectional=True, **whole)
        self.decoder = _Stack(model, training, decoder, bidirectional=False, **whole)
        self.head = own_head(model, training, **split)

    def forward(self, tokens: Tensor, decoder_tokens: Tensor, noise: Noise | None = None) -> Tensor:
        """tokens [b, s/c], decoder_tokens [b, q/c]: this rank's part of them."""
        source = self._embedded(tokens, noise, "encoder.embedding")
        target = self._embedded(decoder_tokens, noise, "decoder.embedding")
        source = self.encoder(source, tokens.shape[1] * self.cp.size, noise)
        hidden = self.decoder(target, decoder_tokens.shape[1] * self.cp.size, source, noise)
        if self.head is not None:
            return self.head(hidden)
        return tied_logits(hidden * self.model.hidden**-0.5, self.embedding.word)

    def _embedded(self, tokens: Tensor, noise: Noise | None, site: str) -> Tensor:
        return self.embedding.dropped(self.embedding(tokens), noise, site=site)

    def loss(self, batch: Batch, noise: Noise | None) -> Tensor:
        logits = self(batch["tokens"], batch["decoder_tokens"], noise)
        first = self.embedding.word.vocab_range.start
        losses = vocab_parallel_cross_entropy(
            logits, batch["targets"], group=self.group, first=first
        )
        return weighted_sum(losses, batch["weights"])


def _decoder_layers(model: Model, training: Training, **whole: Any) -> nn.ModuleDict:
    settings = layer_settings(model, training)
    return nn.ModuleDict({
        str(n): ParallelDecoderLayer(
            model.hidden, model.heads, model.ffn, site=f"decoder.layers.{n}", scale=UNSCALED,
            **settings, **whole,
        )
        for n in range(model.decoder_layers or 0)
    })  # fmt: skip
