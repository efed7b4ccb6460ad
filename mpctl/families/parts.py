"""Parts that the families' modules have in common, built from a `ModelSpec` and a `TrainingSpec`.

A pipeline stage builds its slice of each stack (operators/table.py): some layers, the entry with
the first, the exit with the last. A tied head needs the word table, so that the exit has one too.
What is split over tensor-parallel ranks comes from `ShardContext.layers`; nothing here names a
split module.

Letters: b batch, s sequence, h hidden, v vocabulary; t tp, c cp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.rotary import Rotary
from mpctl.layers.config import AttentionConfig, LayerConfig, MLPConfig
from mpctl.layers.parameters import Init
from mpctl.layers.shard_context import ShardContext
from mpctl.layers.transformer_layer import ParallelTransformerLayer
from mpctl.sharding import padded_vocab
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.transport.group import Group


def layer_config(
    model: ModelSpec, training: TrainingSpec, *, causal: bool, scale: float | None = None
) -> LayerConfig:
    """The layers of a job's model. causal, scale: as AttentionConfig's.

    Projections into the residual start smaller by 1/sqrt(2L) for L layers (Radford et al. 2019,
    GPT-2).
    """
    std = training.init_std
    mlp = MLPConfig(
        model.hidden, model.ffn, model.activation, "mlp" in model.biased, std,
        std / (2 * model.layers) ** 0.5,
    )  # fmt: skip
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


def _attention_config(
    model: ModelSpec, training: TrainingSpec, mlp: MLPConfig, *, causal: bool, scale: float | None
) -> AttentionConfig:
    """The attention beside `mlp`, whose projections have the same initial values."""
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
        eps=model.norm_epsilon,
        bias="qkv" in model.biased,
        output_bias="output" in model.biased,
        init_std=mlp.init_std,
        output_std=mlp.output_std,
    )


def _rotary(model: ModelSpec, base: float, *, scaled: bool = True) -> Rotary | None:
    if model.position != "rotary":
        return None
    scaling = model.rotary_scaling.model_dump() if model.rotary_scaling and scaled else None
    size, fraction = model.head_size, model.rotary_fraction
    return Rotary(size, base, scaling, None if fraction == 1 else int(size * fraction))


def with_window(config: LayerConfig, model: ModelSpec, layer: int) -> LayerConfig:
    """The configuration of the layer of this number, whose attention may have a window, and with it
    another base of rotary positions, which no scaling stretches."""
    window = model.window_of(layer)
    if window is None:
        return config
    attention = replace(config.attention, window=window)
    if model.window_rotary_base is not None:
        rotary = _rotary(model, model.window_rotary_base, scaled=False)
        attention = replace(attention, rotary=rotary)
    return replace(config, attention=attention)


def self_attention_layers(
    config: LayerConfig,
    shard_context: ShardContext,
    numbers: Iterable[int],
    *,
    prefix: str,
    model: ModelSpec,
) -> nn.ModuleDict:
    """Layers of self-attention and MLP, by their global numbers: `prefix.7`. model: says which of
    them have windows."""
    layers = {
        str(n): ParallelTransformerLayer(
            with_window(config, model, n), shard_context, f"{prefix}.{n}"
        )
        for n in numbers
    }
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
            self.add_module(name, layers.replicated_table(rows, model.hidden, init=init))

    def forward(self, tokens: Tensor, **rows: Tensor | None) -> Tensor:
        """rows: of each table, the row numbers [b, s/c]; None for the tokens' positions."""
        hidden: Tensor = self.word(tokens)
        context = self.shard_context
        for name, numbers in rows.items():
            if numbers is None:
                own = context.positions(hidden.shape[1], hidden.device)
            else:
                own = context.own_rows(numbers)
            hidden = hidden + self.get_submodule(name)(own)
        return hidden

    def dropped(
        self, hidden: Tensor, rng: CounterRNG | None, *, rng_site: str = "embedding"
    ) -> Tensor:
        """hidden with dropout; rng None is no dropout."""
        return self.shard_context.dropout(hidden, rng, self.dropout, rng_site=rng_site)


def padded(model: ModelSpec, group: Group) -> int:
    """Rows of the word table, padded so that the tensor-parallel `group` divides them."""
    return padded_vocab(model.vocab, tp=group.size, divisor=model.vocab_divisor)


def output_head(
    model: ModelSpec, training: TrainingSpec, shard_context: ShardContext
) -> nn.Module | None:
    """The matrix that gives logits; None where it is the word table's (tied embeddings)."""
    if model.tied_embeddings:
        return None
    return shard_context.layers.output_head(
        model.vocab,
        model.hidden,
        padded_vocab=padded(model, shard_context.tp),
        init=Init("normal", training.init_std),
    )


def model_norm(model: ModelSpec, shard_context: ShardContext) -> nn.Module:
    """A norm of the model's kind over [.., h]."""
    return shard_context.layers.norm(model.norm, model.hidden, eps=model.norm_epsilon)


def word_losses(
    model: ModelSpec, shard_context: ShardContext, logits: Tensor, targets: Tensor
) -> Tensor:
    """-log p(target) of every token: logits [b, s/c, v_local], targets [b, s/c] -> [b, s/c]; the
    vocabulary is never gathered."""
    rows = padded(model, shard_context.tp)
    return shard_context.layers.cross_entropy(logits, targets, padded_vocab=rows)


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """losses [b, s] times weights [b, s] of any float type, summed to a scalar."""
    return (losses * weights.to(losses.dtype)).sum()
