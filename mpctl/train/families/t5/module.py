"""T5 as a module, with the same names and shapes of parameters as in its operator table (ops.py).

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
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from mpctl.model.operators.table import StageSlice
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.families.implementation import Batch, EncoderDecoderModule, FamilyImplementation, State
from mpctl.train.families.parts import (
    Embedding,
    layer_config,
    linear_losses,
    mlp_config,
    model_norm,
    output_head,
    self_attention_layers,
    weighted_sum,
    without_padding,
    word_losses,
)
from mpctl.train.families.t5.samples import T5Samples
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.layers.attention import AttentionConfig, DecoderCaches
from mpctl.train.layers.config import LayerConfig
from mpctl.train.layers.context_parallel import context_positions
from mpctl.train.layers.relative_bias import RelativeBias
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.layers.transformer_layer import ParallelDecoderLayer

UNSCALED, WORD_STD, USUAL_STD = 1.0, 1.0, 0.02


def t5_layer_config(model: ModelSpec, training: TrainingSpec, *, causal: bool) -> LayerConfig:
    """The layers of a stack, with T5's initial values (its released code, as in transformers):
    standard deviation 1/sqrt(n) for a matrix that reads n features, and 1/sqrt(h d) for queries of
    heads of d, whose scores are not scaled. training.init_std scales all of them: times 1 at
    0.02, which other families start with."""
    config, factor = layer_config(model, training, causal=causal, scale=UNSCALED), _factor(training)
    attention, h = config.attention, model.hidden
    assert isinstance(attention, AttentionConfig)  # no job of this family has another
    std, d = factor * h**-0.5, attention.head_size
    attention = replace(
        attention, init_std=std, query_std=std * d**-0.5, output_std=factor * (attention.heads * d) ** -0.5
    )
    mlp = replace(mlp_config(model, training), init_std=std, output_std=factor * model.ffn**-0.5)
    return replace(config, attention=attention, mlp=mlp)


def _factor(training: TrainingSpec) -> float:
    return training.init_std / USUAL_STD


class _Stack(nn.Module):
    """Layers with the relative bias that they add, and the norm behind the last of them."""

    def __init__(
        self,
        model: ModelSpec,
        training: TrainingSpec,
        shard_context: ShardContext,
        stage_slice: StageSlice,
        layers: nn.ModuleDict,
        *,
        bidirectional: bool,
    ) -> None:
        super().__init__()
        self.cp, self.layers, self.stage_slice = shard_context.cp, layers, stage_slice
        self.position = None
        if layers:
            self.position = RelativeBias(
                model.relative_buckets,
                model.relative_max_distance,
                model.heads,
                shard_context,
                bidirectional=bidirectional,
                init_std=_factor(training) * model.hidden**-0.5,
            )
        has_exit = stage_slice.has_exit
        self.final_norm = model_norm(model, shard_context) if has_exit else nn.Identity()

    def forward(self, hidden: Tensor, length: int, *args: Any, **masks: Tensor | None) -> Tensor:
        """hidden [b, s/c, h] -> [b, s/c, h]. length: that of the unsplit sequence; args: a
        decoder's context, and the rng; masks: as the layers take them."""
        if self.position is not None:
            cp = self.cp
            rows = context_positions(length, cp.size, cp.rank, device=hidden.device)
            bias = self.position.at(rows, range(length))
            for layer in self.layers.values():
                hidden = layer(hidden, *args, bias=bias, **masks)
        normed: Tensor = self.final_norm(hidden)
        return normed

    def decode_step(
        self, hidden: Tensor, context: Tensor, caches: Sequence[DecoderCaches], mask: Tensor | None
    ) -> Tensor:
        """hidden [b, q, h] of the decoder's positions behind those in the caches -> [b, q, h]."""
        if self.position is None or caches[0].own is None:
            raise ValueError("a step of decoding needs layers, with a cache each")
        start = caches[0].own.length
        rows = range(start, start + hidden.shape[1])
        bias = self.position.at(rows, range(rows.stop))
        for layer, pair in zip(self.layers.values(), caches, strict=True):
            hidden = layer(hidden, context, None, bias=bias, context_mask=mask, caches=pair)
        normed: Tensor = self.final_norm(hidden)
        return normed


class T5(EncoderDecoderModule):
    """A batch has tokens [b, s/c], and decoder_tokens, targets and weights [b, q/c]; the loss of a
    sample is the mean over its targets."""

    EMBEDDING_SITES = ("encoder.embedding", "decoder.embedding")

    def __init__(
        self, model: ModelSpec, training: TrainingSpec, shard_context: ShardContext, *stage_slices: StageSlice
    ) -> None:
        super().__init__()
        self.model, self.shard_context = model, shard_context
        self.is_linear, self.loss_chunks = training.cross_entropy == "linear", training.cross_entropy_chunks
        self.encoder = _encoder(model, training, shard_context, stage_slices)
        self.decoder = _decoder(model, training, shard_context, stage_slices)
        self.has_entry = any(part.has_entry for part in stage_slices)
        self.has_exit = self.decoder is not None and self.decoder.stage_slice.has_exit
        self.embedding = None
        if self.has_entry or (self.has_exit and model.tied_embeddings):
            self.embedding = Embedding(model, training, shard_context, tables={}, word_std=WORD_STD)
        self.head = output_head(model, training, shard_context) if self.has_exit else None

    @property
    def decoder_depth(self) -> int:
        """Layers of the decoder in this module."""
        return len(self.decoder.layers) if self.decoder is not None else 0

    def stage_forward(self, state: State, batch: Batch, rng: CounterRNG | None) -> State:
        """Compute the next stage's state from the previous one's: the encoder's hidden states or y,
        then the decoder's hidden states and y; from the last stage the loss, a scalar."""
        if self.encoder is not None:
            state = (self.encode(state, batch, rng),)
        if self.decoder is None:
            return state
        hidden, source = self.decode(state, batch, rng)
        if not self.has_exit:
            return hidden, source
        losses = self._losses(hidden, batch["targets"])
        return (weighted_sum(losses, batch["weights"]),)

    def forward(self, batch: Batch, rng: CounterRNG | None = None) -> Tensor:
        """Logits [b, q/c, words] of this rank's words, of a model in one stage."""
        source = self.encode((), batch, rng)
        logits = self.logits(self.decode((source,), batch, rng)[0])
        return without_padding(logits, self.model, self.shard_context)

    def encode(self, state: State, batch: Batch, rng: CounterRNG | None, *, mask: Tensor | None = None) -> Tensor:
        """The encoder's result y; mask [b, 1, 1, s]: which tokens are no padding."""
        assert self.encoder is not None
        tokens = batch["tokens"]
        hidden = state[0] if state else self._embedded(tokens, rng, "encoder.embedding")
        length = tokens.shape[1] * self.shard_context.cp.size
        encoded: Tensor = self.encoder(hidden, length, rng, mask=mask)
        return encoded

    def decode_step(
        self, batch: Batch, source: Tensor, caches: Sequence[DecoderCaches], *, mask: Tensor | None = None
    ) -> Tensor:
        """Logits [b, words] behind the last of the batch's decoder tokens, which follow those in
        the caches, one pair a layer. source: y [b, s, h]; mask [b, 1, 1, s] over it. A model in
        one stage, without sequence or context parallelism."""
        assert self.decoder is not None
        hidden = self._embedded(batch["decoder_tokens"], None, "decoder.embedding")
        hidden = self.decoder.decode_step(hidden, source, caches, mask)
        logits = self.logits(hidden[:, -1:])[:, 0]
        return without_padding(logits, self.model, self.shard_context)

    def decode(self, state: State, batch: Batch, rng: CounterRNG | None) -> tuple[Tensor, Tensor]:
        """state: the encoder's result y alone, or hidden states and y -> both."""
        assert self.decoder is not None
        self.adapter_rng.rng = rng
        tokens, source = batch["decoder_tokens"], state[-1]
        hidden = self._embedded(tokens, rng, "decoder.embedding") if self.decoder.stage_slice.has_entry else state[0]
        length = tokens.shape[1] * self.shard_context.cp.size
        return self.decoder(hidden, length, source, rng), source

    def logits(self, hidden: Tensor) -> Tensor:
        """Behind the decoder's norm -> [b, q/c, v_local], padding behind the words."""
        if self.head is not None:
            logits: Tensor = self.head(hidden)
            return logits
        assert self.embedding is not None
        return self.embedding.logits(self._scaled(hidden))

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if not self.is_linear:
            return word_losses(self.model, self.shard_context, self.logits(hidden), targets)
        table = self.head
        if table is None:
            assert self.embedding is not None
            hidden, table = self._scaled(hidden), self.embedding.word
        return linear_losses(self.model, self.shard_context, hidden, table, targets, self.loss_chunks)

    def _scaled(self, hidden: Tensor) -> Tensor:
        return hidden * self.model.hidden**-0.5

    def _embedded(self, tokens: Tensor, rng: CounterRNG | None, rng_site: str) -> Tensor:
        assert self.embedding is not None
        return self.embedding.dropped(self.embedding(tokens), rng, rng_site=rng_site)


def _slice_of(stage_slices: Sequence[StageSlice], prefix: str) -> StageSlice | None:
    return next((part for part in stage_slices if part.stack.prefix == prefix), None)


def _encoder(
    model: ModelSpec, training: TrainingSpec, shard_context: ShardContext, stage_slices: Sequence[StageSlice]
) -> _Stack | None:
    part = _slice_of(stage_slices, "encoder.layers")
    if part is None:
        return None
    config = t5_layer_config(model, training, causal=False)
    layers = self_attention_layers(lambda _: config, shard_context, part.layers, prefix=part.stack.prefix)
    return _Stack(model, training, shard_context, part, layers, bidirectional=True)


def _decoder(
    model: ModelSpec, training: TrainingSpec, shard_context: ShardContext, stage_slices: Sequence[StageSlice]
) -> _Stack | None:
    part = _slice_of(stage_slices, "decoder.layers")
    if part is None:
        return None
    config = t5_layer_config(model, training, causal=True)
    layers = nn.ModuleDict(
        {str(n): ParallelDecoderLayer(config, shard_context, f"{part.stack.prefix}.{n}") for n in part.layers}
    )
    return _Stack(model, training, shard_context, part, layers, bidirectional=False)


IMPLEMENTATION = FamilyImplementation(module=T5, samples=T5Samples)
