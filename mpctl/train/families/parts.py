"""Parts that the families' modules have in common, built from a `ModelSpec` and a `TrainingSpec`.

A pipeline stage builds its slice of each stack (model/operators/table.py): some layers, the entry with
the first, the exit with the last. A tied head needs the word table, so that the exit has one too.
What is split over tensor-parallel ranks comes from `ShardContext.layers`; nothing here names a
split module.

Letters: b batch, s sequence, h hidden, v vocabulary; t tp, c cp. v_local: columns of a rank's
logits, which are its words and behind them the padding of the table (`without_padding`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mpctl.core.sharding import padded_vocab
from mpctl.model.operators.table import StageSlice
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.families.implementation import Batch, FamilyModule, State
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.kernels.rotary import CosSin, Rotary, Yarn
from mpctl.train.layers.attention import AttentionConfig, KeyValueCache
from mpctl.train.layers.config import LayerConfig
from mpctl.train.layers.experts import ExpertsConfig, RouterConfig
from mpctl.train.layers.latent_attention import LatentAttentionConfig
from mpctl.train.layers.mlp import MLPConfig
from mpctl.train.layers.parameters import Init
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.layers.transformer_layer import ParallelTransformerLayer, ResidualLayer
from mpctl.train.transport.group import Group


def layer_config(model: ModelSpec, training: TrainingSpec, *, causal: bool, scale: float | None = None) -> LayerConfig:
    """The layers of a job's model. causal, scale: as AttentionConfig's."""
    mlp = mlp_config(model, training)
    return LayerConfig(
        _attention_config(model, training, mlp, causal=causal, scale=scale),
        mlp,
        norm=model.norm,
        eps=model.norm_epsilon,
        norm_order=model.norm_order,
        dropout=training.dropout,
        recompute=training.recompute,
        partition_activations=training.partition_activations,
        offload_activations=training.offload_activations,
        parallel_residual=model.parallel_residual,
        shared_norm=model.shared_norm,
    )


def mlp_config(model: ModelSpec, training: TrainingSpec) -> MLPConfig:
    """The MLP of a layer. Projections into the residual start smaller by 1/sqrt(2L) for L layers
    (Radford et al. 2019, GPT-2)."""
    std = training.init_std
    return MLPConfig(
        model.hidden, model.ffn, model.activation, "mlp" in model.biased, std, std / (2 * model.layers) ** 0.5
    )


def experts_config(model: ModelSpec, training: TrainingSpec) -> ExpertsConfig:
    """The experts of a layer that has them, with initial values as the MLP's."""
    assert model.experts is not None
    router = RouterConfig(
        model.experts,
        model.experts_per_token,
        score=model.router_score,
        renormalize=model.router_renormalize,
        scale=model.router_scale,
        has_bias=model.router_bias,
        groups=model.router_groups,
        groups_per_token=model.router_groups_per_token,
        balancing=training.moe_load_balancing,
        aux_coefficient=training.moe_aux_loss_coeff,
        z_coefficient=training.moe_z_loss_coeff,
    )
    mlp = mlp_config(model, training)
    return ExpertsConfig(
        model.hidden,
        model.expert_width,
        router,
        model.activation,
        model.shared_expert_ffn,
        model.shared_expert_gate,
        mlp.init_std,
        mlp.output_std,
    )


def _attention_config(
    model: ModelSpec, training: TrainingSpec, mlp: MLPConfig, *, causal: bool, scale: float | None
) -> AttentionConfig | LatentAttentionConfig:
    """The attention of a layer with `mlp`, whose projections have the same initial values."""
    if model.is_mla:
        return _latent_attention_config(model, training, mlp, causal=causal, scale=scale)
    return AttentionConfig(
        model.hidden,
        model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_size,
        causal=causal,
        scale=model.attention_scale if scale is None else scale,
        dropout=training.attention_dropout,
        rotary=_rotary(model, model.rotary_base),
        alibi=model.position == "alibi",
        qk_norm=model.norm if model.qk_norm else None,
        norms_width=model.qk_norm == "width",
        eps=model.norm_epsilon,
        bias="qkv" in model.biased,
        output_bias="output" in model.biased,
        init_std=mlp.init_std,
        output_std=mlp.output_std,
    )


def _latent_attention_config(
    model: ModelSpec, training: TrainingSpec, mlp: MLPConfig, *, causal: bool, scale: float | None
) -> LatentAttentionConfig:
    """Latent attention. Raises ValueError for a width that is absent, and for what it does not
    have: ALiBi, and norms of queries and keys other than those of its latents."""
    for key, is_set in (("position alibi", model.position == "alibi"), ("qk_norm", model.qk_norm)):
        if is_set:
            raise ValueError(f"{key}: latent attention has none (leave it out)")
    return LatentAttentionConfig(
        model.hidden,
        model.heads,
        kv_lora_rank=model.kv_lora_rank or 0,
        qk_nope_head_dim=model.qk_nope_head_dim or 0,
        qk_rope_head_dim=model.qk_rope_head_dim or 0,
        v_head_dim=model.v_head_dim or 0,
        q_lora_rank=model.q_lora_rank,
        causal=causal,
        scale=model.attention_scale if scale is None else scale,
        dropout=training.attention_dropout,
        rotary=_rotary(model, model.rotary_base),
        norm=model.norm,
        eps=model.norm_epsilon,
        init_std=mlp.init_std,
        output_std=mlp.output_std,
    )


def _rotary(model: ModelSpec, base: float, *, scaled: bool = True) -> Rotary | None:
    if model.position != "rotary":
        return None
    scaling = model.rotary_scaling.model_dump() if model.rotary_scaling and scaled else None
    yarn = Yarn(**model.yarn_scaling.model_dump()) if model.yarn_scaling and scaled else None
    if model.is_mla:  # whose queries and keys have columns of their own for rotary positions
        size, fraction = model.qk_rope_head_dim or 0, 1.0
    else:
        size, fraction = model.head_size, model.rotary_fraction
    return Rotary(size, base, scaling, None if fraction == 1 else int(size * fraction), yarn)


def with_window(config: LayerConfig, model: ModelSpec, layer: int) -> LayerConfig:
    """The configuration of the layer of this number, whose attention may have a window, and with it
    another base of rotary positions, which no scaling stretches."""
    window = model.window_of(layer)
    if window is None:
        return config
    attention = config.attention
    assert isinstance(attention, AttentionConfig | LatentAttentionConfig)
    attention = replace(attention, window=window)
    if model.window_rotary_base is not None:
        rotary = _rotary(model, model.window_rotary_base, scaled=False)
        attention = replace(attention, rotary=rotary)
    return replace(config, attention=attention)


def self_attention_layers(
    config_of: Callable[[int], LayerConfig], shard_context: ShardContext, numbers: Iterable[int], *, prefix: str
) -> nn.ModuleDict:
    """Layers of self-attention and MLP, by their global numbers: `prefix.7`. config_of: the
    configuration of the layer of a number; layers of a stack may differ."""
    layers = {str(n): ParallelTransformerLayer(config_of(n), shard_context, f"{prefix}.{n}") for n in numbers}
    return nn.ModuleDict(layers)


class Embedding(nn.Module):
    """tokens [b, s/c] -> [b, s/c, h], or this rank's [b, s/(ct), h] of it: the sum of the word's
    vector and of a row of each further table, then dropout.

    tables: rows of the further tables, by name (positions, segments). word_std: standard deviation
    of initial word vectors, training.init_std by default.
    """

    def __init__(
        self,
        model: ModelSpec,
        training: TrainingSpec,
        shard_context: ShardContext,
        *,
        tables: Mapping[str, int],
        word_std: float | None = None,
    ) -> None:
        super().__init__()
        layers, init = shard_context.layers, Init("normal", training.init_std)
        self.dropout, self.shard_context = training.dropout, shard_context
        self.word = layers.word_embedding(
            model.vocab,
            model.hidden,
            padded_vocab=padded(model, shard_context.tp),
            init=init if word_std is None else Init("normal", word_std),
        )
        for name, rows in tables.items():
            self.add_module(name, shard_context.replicated_table(rows, model.hidden, init=init))

    def forward(self, tokens: Tensor, **rows: Tensor | None) -> Tensor:
        """rows: of each table, the row numbers [b, s/c]; None for the tokens' positions."""
        hidden: Tensor = self.word(tokens)
        context = self.shard_context
        for name, numbers in rows.items():
            own = context.positions(hidden.shape[1], hidden.device) if numbers is None else context.own_rows(numbers)
            hidden = hidden + self.get_submodule(name)(own)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [b, s/c, h] -> [b, s/c, v_local], by the word table as a tied head."""
        tied: Any = self.word
        logits: Tensor = tied.logits(hidden)
        return logits

    def dropped(self, hidden: Tensor, rng: CounterRNG | None, *, rng_site: str = "embedding") -> Tensor:
        """hidden with dropout; rng None is no dropout."""
        return self.shard_context.dropout(hidden, rng, self.dropout, rng_site=rng_site)


def padded(model: ModelSpec, group: Group) -> int:
    """Rows of the word table, padded so that the tensor-parallel `group` divides them."""
    return padded_vocab(model.vocab, tp=group.size, divisor=model.vocab_divisor)


def own_words(model: ModelSpec, shard_context: ShardContext) -> range:
    """Global ids of the words of this rank's logits; the columns behind theirs are padding."""
    return shard_context.own_words(model.vocab, padded_vocab=padded(model, shard_context.tp))


def without_padding(logits: Tensor, model: ModelSpec, shard_context: ShardContext) -> Tensor:
    """Logits [.., v_local] of a head -> a view of those of this rank's words."""
    return logits[..., : len(own_words(model, shard_context))]


def output_head(model: ModelSpec, training: TrainingSpec, shard_context: ShardContext) -> nn.Module | None:
    """The matrix that gives logits; None where it is the word table's (tied embeddings)."""
    if model.tied_embeddings:
        return None
    return shard_context.layers.output_head(
        model.vocab, model.hidden, padded_vocab=padded(model, shard_context.tp), init=Init("normal", training.init_std)
    )


def model_norm(model: ModelSpec, shard_context: ShardContext) -> nn.Module:
    """A norm of the model's kind over [.., h]."""
    return shard_context.norm(model.norm, model.hidden, eps=model.norm_epsilon)


def word_losses(model: ModelSpec, shard_context: ShardContext, logits: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) of every token: logits [b, s/c, v_local], targets [b, s/c] -> [b, s/c]; the
    vocabulary is never gathered."""
    words = own_words(model, shard_context)
    return shard_context.cross_entropy(logits, targets, words=words)


def linear_losses(
    model: ModelSpec, shard_context: ShardContext, hidden: Tensor, table: nn.Module, targets: Tensor, chunks: int | None
) -> Tensor:
    """The same from the head's input [b, s/c, h] and the module of its table, head or word table, without
    the logits of all tokens (training.cross_entropy linear)."""
    words, weight = own_words(model, shard_context), table.get_parameter("weight")
    return shard_context.linear_cross_entropy(hidden, weight, targets, words=words, chunks=chunks)


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """losses [b, s] times weights [b, s] of any float type, summed to a scalar."""
    return (losses * weights.to(losses.dtype)).sum()


class SingleStackModule(FamilyModule):
    """Base of the families with one stack; a stage holds some layers, either end, or none of them: it
    then hands on what it receives.

    IS_CAUSAL: whether a token sees earlier ones only. HAS_FINAL_NORM: whether a norm follows the
    last layer, where layers do not end with one. Subclasses define `embed` and `compute_loss`;
    `tables` where tokens have more than a word, `layer_kwargs` where the layers need more than
    hidden states, `layer_config` where layers differ in kind, and `logits` where more lies behind
    the last layer than a norm and the words' head.
    """

    IS_CAUSAL: ClassVar[bool] = True
    HAS_FINAL_NORM: ClassVar[bool] = True

    def __init__(
        self, model: ModelSpec, training: TrainingSpec, shard_context: ShardContext, *stage_slices: StageSlice
    ) -> None:
        super().__init__()
        self.model, self.shard_context = model, shard_context
        self.is_linear, self.loss_chunks = training.cross_entropy == "linear", training.cross_entropy_chunks
        own = next((part for part in stage_slices if not part.stack.predictions), None)
        self.has_entry = own is not None and own.has_entry
        self.has_exit = any(part.has_exit and part.stack.exit.makes_logits for part in stage_slices)
        self.embedding: Embedding | None = None
        used = {w.name.removesuffix(".weight") for part in stage_slices for end in part.ends for w in end.part.weights}
        if self.has_entry or "embedding.word" in used:
            tables = self.tables(model) if self.has_entry else {}
            self.embedding = Embedding(model, training, shard_context, tables=tables)
        self.layers = self_attention_layers(
            partial(self.layer_config, training), shard_context, own.layers if own else (), prefix="layers"
        )
        like = torch.empty(0, dtype=shard_context.dtype, device=shard_context.device)
        for layer in self.layers.values():  # made here, so that each step takes the same memory
            self._table(layer, model.seq_length // shard_context.cp.size, like)
        self.head = output_head(model, training, shard_context) if self.has_exit else None
        has_norm = own is not None and own.has_exit and self.HAS_FINAL_NORM and model.norm_order != "post"
        self.final_norm = model_norm(model, shard_context) if has_norm else nn.Identity()

    def tables(self, model: ModelSpec) -> Mapping[str, int]:
        """Rows of the embedding's tables other than the words', by name: positions, segments."""
        return {}

    def layer_config(self, training: TrainingSpec, layer: int) -> LayerConfig:
        """The configuration of the layer of this number."""
        return with_window(self.layer_kind(training, layer), self.model, layer)

    def layer_kind(self, training: TrainingSpec, layer: int) -> LayerConfig:
        """The configuration of that layer without a window."""
        config = layer_config(self.model, training, causal=self.IS_CAUSAL)
        if self.model.has_experts(layer):
            config = replace(config, mlp=experts_config(self.model, training))
        return config

    def stage_forward(self, state: State, batch: Batch, rng: CounterRNG | None) -> State:
        """See FamilyModule: the stage's state is the hidden states [b, s/c, h]."""
        hidden = self.embed(batch, rng) if self.has_entry else state[0]
        hidden = self._transform(hidden, batch, rng)
        return (self.compute_loss(hidden, batch) if self.has_exit else self.final_norm(hidden),)

    def forward(self, batch: Batch, rng: CounterRNG | None = None) -> Any:
        """Logits of this rank's words, in the form of `logits`, of a model in one stage."""
        hidden = self._transform(self.embed(batch, rng), batch, rng)
        return self.without_padding(self.logits(hidden))

    def _transform(self, hidden: Tensor, batch: Batch, rng: CounterRNG | None) -> Tensor:
        kwargs, context = self.layer_kwargs(batch), self.shard_context
        self.adapter_rng.rng = rng
        rows = hidden.shape[1] * (context.tp.size if context.sequence_parallel else 1)
        for layer in self.layers.values():
            hidden = layer(hidden, rng, cos_sin=self._table(layer, rows, hidden), **kwargs)
        return hidden

    def _table(self, layer: nn.Module, rows: int, like: Tensor) -> CosSin | None:
        """The table of the layer's rotary positions, which layers share (RotaryTables)."""
        assert isinstance(layer, ResidualLayer)
        rotary, context = layer.config.attention.rotary, self.shard_context
        if rotary is None:
            return None
        return context.rotary_tables.rows(rotary, rows, context.cp, like)

    def decode_step(self, batch: Batch, caches: Sequence[KeyValueCache], *, mask: Tensor | None = None) -> Tensor:
        """Logits [b, words] of the last of the batch's positions, which follow those in the
        caches, one a layer; needs a model in one stage without sequence or context parallelism.

        batch: of the new positions alone, with their `positions` [b, s]. mask [b, 1, s or 1, all
        positions]: which of them may be seen, in addition to the layers' masks.
        """
        hidden, positions = self.embed(batch, None), batch["positions"]
        for layer, cache in zip(self.layers.values(), caches, strict=True):
            hidden = layer(hidden, None, mask=mask, positions=positions, cache=cache)
        logits: Tensor = self.without_padding(self.logits(hidden[:, -1:]))
        return logits[:, 0]

    def embed(self, batch: Batch, rng: CounterRNG | None) -> Tensor:
        """Hidden states [b, s/c, h] (or [b, s/(ct), h]) of the batch's tokens."""
        raise NotImplementedError

    def layer_kwargs(self, batch: Batch) -> dict[str, Tensor]:
        """Further arguments of every layer's forward, such as a mask."""
        return {}

    def logits(self, hidden: Tensor) -> Any:
        """Hidden states behind the last layer [b, s/c, h] -> [b, s/c, v_local], or another form."""
        return self.word_logits(self.final_norm(hidden))

    def without_padding(self, logits: Any) -> Any:
        """Return a view of the result of `logits` without padding: only this rank's words."""
        return without_padding(logits, self.model, self.shard_context)

    def compute_loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Hidden states behind the last layer -> the loss, a scalar (see
        FamilyModule.stage_forward)."""
        raise NotImplementedError

    def word_logits(self, hidden: Tensor) -> Tensor:
        """[b, s/c, h] -> [b, s/c, v_local], by the word table or by a head of its own."""
        if self.head is not None and not self.model.tied_embeddings:
            logits: Tensor = self.head(hidden)
            return logits
        if self.embedding is None:
            raise RuntimeError("logits are asked of a pipeline stage without the output head")
        return self.embedding.logits(hidden)

    def head_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The head's input [b, s/c, h], targets [b, s/c] -> losses [b, s/c]."""
        if not self.is_linear:
            return self.word_losses(self.word_logits(hidden), targets)
        table = self.embedding.word if self.head is None and self.embedding is not None else self.head
        if table is None:
            raise RuntimeError("losses are asked of a pipeline stage without the output head")
        return linear_losses(self.model, self.shard_context, hidden, table, targets, self.loss_chunks)

    def word_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits [b, s/c, v_local], targets [b, s/c] -> losses [b, s/c]."""
        return word_losses(self.model, self.shard_context, logits, targets)
