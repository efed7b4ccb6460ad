"""A family of one stack of self-attention layers, of which a pipeline stage builds a slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpctl.families.batch import Batch, FamilyModule, State
from mpctl.families.parts import (
    Embedding,
    layer_config,
    output_head,
    self_attention_layers,
    word_losses,
)
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.rotary import Turns
from mpctl.layers.attention import KeyValueCache
from mpctl.layers.shard_context import ShardContext
from mpctl.layers.transformer_layer import ResidualLayer
from mpctl.operators.table import StageSlice
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec


class SingleStackModule(FamilyModule):
    """Base of the families with one stack; a stage holds some layers, and either end or none.

    tables: rows of the embedding's tables beside the words', by name. causal: whether a token sees
    earlier ones only. Subclasses define `embed`, `logits` and `compute_loss`, and `layer_kwargs`
    where the layers need more than hidden states.
    """

    def __init__(
        self,
        model: ModelSpec,
        training: TrainingSpec,
        shard_context: ShardContext,
        stage_slice: StageSlice,
        *,
        tables: Mapping[str, int],
        causal: bool,
    ) -> None:
        super().__init__()
        self.model, self.shard_context, self.stage_slice = model, shard_context, stage_slice
        needs_words = stage_slice.has_entry or (stage_slice.has_exit and model.tied_embeddings)
        own_tables = tables if stage_slice.has_entry else {}
        self.embedding = (
            Embedding(model, training, shard_context, tables=own_tables) if needs_words else None
        )
        config = layer_config(model, training, causal=causal)
        self.layers = self_attention_layers(
            config, shard_context, stage_slice.layers, prefix="layers", model=model
        )
        like = torch.empty(0, dtype=shard_context.dtype, device=shard_context.device)
        for layer in self.layers.values():  # made here, so that each step takes the same memory
            self._table(layer, model.seq_length // shard_context.cp.size, like)
        self.head: nn.Module | None = None
        if stage_slice.has_exit:
            self.head = output_head(model, training, shard_context)

    def advance(self, state: State, batch: Batch, rng: CounterRNG | None) -> State:
        """See FamilyModule: the stage's state is the hidden states [b, s/c, h]."""
        hidden = self.embed(batch, rng) if self.stage_slice.has_entry else state[0]
        hidden = self._transform(hidden, batch, rng)
        return (self.compute_loss(hidden, batch),) if self.stage_slice.has_exit else (hidden,)

    def forward(self, batch: Batch, rng: CounterRNG | None = None) -> Any:
        """Logits, as `logits` gives them, of a model in one stage."""
        return self.logits(self._transform(self.embed(batch, rng), batch, rng))

    def _transform(self, hidden: Tensor, batch: Batch, rng: CounterRNG | None) -> Tensor:
        kwargs = self.layer_kwargs(batch)
        for layer in self.layers.values():
            hidden = layer(hidden, rng, turns=self._turns(layer, hidden), **kwargs)
        return hidden

    def _turns(self, layer: nn.Module, hidden: Tensor) -> Turns | None:
        context = self.shard_context
        parts = context.tp.size if context.sequence_parallel else 1
        return self._table(layer, hidden.shape[1] * parts, hidden)

    def _table(self, layer: nn.Module, rows: int, like: Tensor) -> Turns | None:
        """The table of the layer's rotary positions, which layers share (RotaryTables)."""
        assert isinstance(layer, ResidualLayer)
        rotary, context = layer.config.attention.rotary, self.shard_context
        if rotary is None:
            return None
        return context.rotary_tables.rows(rotary, rows, context.cp, like)

    def decode_step(
        self, batch: Batch, caches: Sequence[KeyValueCache], *, mask: Tensor | None = None
    ) -> Tensor:
        """Logits [b, v_local] of the last of the batch's positions, which follow those in the
        caches, one a layer; needs a model in one stage without sequence or context parallelism.

        batch: of the new positions alone, with their `positions` [b, s]. mask [b, 1, s or 1, all
        positions]: which of them may be seen, beside what the layers' own masks say.
        """
        hidden, positions = self.embed(batch, None), batch["positions"]
        for layer, cache in zip(self.layers.values(), caches, strict=True):
            hidden = layer(hidden, None, mask=mask, positions=positions, cache=cache)
        logits: Tensor = self.logits(hidden[:, -1:])
        return logits[:, 0]

    def embed(self, batch: Batch, rng: CounterRNG | None) -> Tensor:
        """Hidden states [b, s/c, h] (or [b, s/(ct), h]) of the batch's tokens."""
        raise NotImplementedError

    def layer_kwargs(self, batch: Batch) -> dict[str, Tensor]:
        """What every layer's forward takes beside hidden states and rng, such as a mask."""
        return {}

    def logits(self, hidden: Tensor) -> Any:
        """Hidden states behind the last layer -> logits, in the family's form."""
        raise NotImplementedError

    def compute_loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Hidden states behind the last layer -> the loss, a scalar (see FamilyModule.advance)."""
        raise NotImplementedError

    def word_logits(self, hidden: Tensor) -> Tensor:
        """[b, s/c, h] -> [b, s/c, v_local], by the word table or by a head of its own."""
        if self.head is not None and not self.model.tied_embeddings:
            logits: Tensor = self.head(hidden)
            return logits
        if self.embedding is None:
            raise RuntimeError("logits are asked of a pipeline stage without the output head")
        return self.shard_context.layers.tied_logits(hidden, self.embedding.word)

    def word_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits [b, s/c, v_local], targets [b, s/c] -> losses [b, s/c]."""
        return word_losses(self.model, self.shard_context, logits, targets)
