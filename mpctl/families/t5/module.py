"""T5 as a module: what the operator table beside it counts, with the same names and shapes.

y = norm(encoder(word[tokens])), z = norm(decoder(word[decoder tokens], y)); every layer of a stack
adds the stack's relative bias to its self-attention's scores, which are not divided by sqrt(d). A
tied table gives logits z word^T / sqrt(h), and words start with a standard deviation of 1 (Raffel
et al., arXiv 1910.10683, section 2.1; the scales are their released code's). T5 1.1: a gated MLP
and a head of its own.

A stage of the encoder hands on its hidden states, one of the decoder those and y.
Letters: b batch, s encoder positions, q decoder positions, h hidden, v vocabulary; t tp, c cp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from mpctl.families.batch import Batch, DecoderCaches, EncoderDecoderModule, State
from mpctl.families.parts import (
    Embedding,
    ShardContext,
    encoder_layers,
    layer_settings,
    norm_of,
    own_head,
    weighted_sum,
    word_losses,
)
from mpctl.kernels.context import context_positions
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.decoder_layer import ParallelDecoderLayer
from mpctl.kernels.embedding import tied_logits
from mpctl.kernels.relative import RelativeBias
from mpctl.operators.table import StageSlice
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec

UNSCALED, WORD_STD = 1.0, 1.0


class _Stack(nn.Module):
    """Layers with the relative bias that they add, and the norm behind the last of them."""

    def __init__(
        self,
        model: ModelSpec,
        training: TrainingSpec,
        place: ShardContext,
        held: StageSlice,
        layers: nn.ModuleDict,
        *,
        bidirectional: bool,
    ) -> None:
        super().__init__()
        self.cp, self.layers, self.held = place.cp, layers, held
        self.position = RelativeBias(
            model.relative_buckets, model.relative_max_distance, model.heads, group=place.group,
            bidirectional=bidirectional, init_std=training.init_std, **place.of_tensors,
        ) if layers else None  # fmt: skip
        self.final_norm = norm_of(model, place) if held.has_exit else nn.Identity()

    def forward(self, hidden: Tensor, length: int, *args: Any, **masks: Tensor | None) -> Tensor:
        """length: of the whole sequence; args: the context of a decoder, and the noise; masks: as
        the layers take them."""
        if self.position is not None:
            cp = self.cp
            rows = context_positions(length, cp.size, cp.rank, device=hidden.device)
            bias = self.position.at(rows, range(length))
            for layer in self.layers.values():
                hidden = layer(hidden, *args, bias=bias, **masks)
        normed: Tensor = self.final_norm(hidden)
        return normed

    def continued(
        self, hidden: Tensor, context: Tensor, caches: Sequence[DecoderCaches], mask: Tensor | None
    ) -> Tensor:
        """hidden [b, q, h] of the decoder's positions after those in the caches -> [b, q, h]."""
        assert self.position is not None
        start = caches[0][0].length
        rows = range(start, start + hidden.shape[1])
        bias = self.position.at(rows, range(rows.stop))
        for layer, pair in zip(self.layers.values(), caches, strict=True):
            hidden = layer(hidden, context, None, bias=bias, context_mask=mask, caches=pair)
        normed: Tensor = self.final_norm(hidden)
        return normed


class T5(EncoderDecoderModule):
    """Fed tokens [b, s/c], decoder_tokens, targets and weights [b, q/c]; the loss of a sample is
    the mean over its targets."""

    def __init__(
        self, model: ModelSpec, training: TrainingSpec, place: ShardContext, *held: StageSlice
    ) -> None:
        super().__init__()
        self.model, self.place = model, place
        self.encoder, self.decoder = (
            _encoder(model, training, place, held),
            _decoder(model, training, place, held),
        )
        self.has_entry = any(part.has_entry for part in held)
        self.has_exit = self.decoder is not None and self.decoder.held.has_exit
        self.embedding = None
        if self.has_entry or (self.has_exit and model.tied_embeddings):
            self.embedding = Embedding(model, training, place, tables={}, word_std=WORD_STD)
        self.head = own_head(model, training, place) if self.has_exit else None

    @property
    def decoder_depth(self) -> int:
        """Layers of the decoder in this module."""
        return len(self.decoder.layers) if self.decoder is not None else 0

    def advance(self, state: State, batch: Batch, noise: CounterRNG | None) -> State:
        if self.encoder is not None:
            state = (self.encoded(state, batch, noise),)
        if self.decoder is None:
            return state
        hidden, source = self.decoded(state, batch, noise)
        if not self.has_exit:
            return hidden, source
        losses = word_losses(self.model, self.place, self.logits(hidden), batch["targets"])
        return (weighted_sum(losses, batch["weights"]),)

    def forward(self, batch: Batch, noise: CounterRNG | None = None) -> Tensor:
        source = self.encoded((), batch, noise)
        return self.logits(self.decoded((source,), batch, noise)[0])

    def encoded(
        self, state: State, batch: Batch, noise: CounterRNG | None, *, mask: Tensor | None = None
    ) -> Tensor:
        """The encoder's result y; mask [b, 1, 1, s]: which tokens are no padding."""
        assert self.encoder is not None
        tokens = batch["tokens"]
        hidden = state[0] if state else self._embedded(tokens, noise, "encoder.embedding")
        length, masks = tokens.shape[1] * self.place.cp.size, {} if mask is None else {"mask": mask}
        encoded: Tensor = self.encoder(hidden, length, noise, **masks)
        return encoded

    def continued(
        self,
        batch: Batch,
        source: Tensor,
        caches: Sequence[DecoderCaches],
        *,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Logits [b, v_local] behind the last of the batch's decoder tokens, which follow those in
        the caches, one pair a layer. source: y [b, s, h]; mask [b, 1, 1, s] over it. A model in
        one stage, without sequence or context parallelism."""
        assert self.decoder is not None
        hidden = self._embedded(batch["decoder_tokens"], None, "decoder.embedding")
        hidden = self.decoder.continued(hidden, source, caches, mask)
        return self.logits(hidden[:, -1:])[:, 0]

    def decoded(
        self, state: State, batch: Batch, noise: CounterRNG | None
    ) -> tuple[Tensor, Tensor]:
        """state: the encoder's result y alone, or hidden states and y -> both."""
        assert self.decoder is not None
        tokens, source = batch["decoder_tokens"], state[-1]
        if self.decoder.held.has_entry:
            hidden = self._embedded(tokens, noise, "decoder.embedding")
        else:
            hidden = state[0]
        return self.decoder(hidden, tokens.shape[1] * self.place.cp.size, source, noise), source

    def logits(self, hidden: Tensor) -> Tensor:
        """Behind the decoder's norm -> [b, q/c, v_local]."""
        if self.head is not None:
            return self.head(hidden)
        assert self.embedding is not None
        return tied_logits(hidden * self.model.hidden**-0.5, self.embedding.word)

    def _embedded(self, tokens: Tensor, noise: CounterRNG | None, site: str) -> Tensor:
        assert self.embedding is not None
        return self.embedding.dropped(self.embedding(tokens), noise, site=site)


def _find(held: Sequence[StageSlice], prefix: str) -> StageSlice | None:
    return next((part for part in held if part.stack.prefix == prefix), None)


def _encoder(
    model: ModelSpec, training: TrainingSpec, place: ShardContext, held: Sequence[StageSlice]
) -> _Stack | None:
    part = _find(held, "encoder.layers")
    if part is None:
        return None
    layers = encoder_layers(
        model, training, place, part.layers, prefix=part.stack.prefix, causal=False,
        scale=UNSCALED,
    )  # fmt: skip
    return _Stack(model, training, place, part, layers, bidirectional=True)


def _decoder(
    model: ModelSpec, training: TrainingSpec, place: ShardContext, held: Sequence[StageSlice]
) -> _Stack | None:
    part = _find(held, "decoder.layers")
    if part is None:
        return None
    settings = layer_settings(model, training) | place.of_layers
    layers = nn.ModuleDict({
        str(n): ParallelDecoderLayer(
            model.hidden, model.heads, model.ffn, site=f"{part.stack.prefix}.{n}",
            scale=UNSCALED, **settings,
        )
        for n in part.layers
    })  # fmt: skip
    return _Stack(model, training, place, part, layers, bidirectional=False)
