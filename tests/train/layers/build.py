"""Layers from flat settings: each goes to the config that has a field of its name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mpctl.train.layers.attention import AttentionConfig, ParallelCrossAttention, ParallelSelfAttention
from mpctl.train.layers.config import LayerConfig
from mpctl.train.layers.mlp import MLPConfig, ParallelMLP
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.layers.transformer_layer import ParallelDecoderLayer, ParallelTransformerLayer


def make_attention(hidden: int, heads: int, rng_site: str, **settings: Any) -> ParallelSelfAttention:
    own = _taken(settings, "recompute")
    context = ShardContext(**_fields(settings, ShardContext))
    return ParallelSelfAttention(AttentionConfig(hidden, heads, **settings), context, rng_site, **own)


def make_cross_attention(hidden: int, heads: int, rng_site: str, **settings: Any) -> ParallelCrossAttention:
    own = _taken(settings, "recompute")
    context = ShardContext(**_fields(settings, ShardContext))
    return ParallelCrossAttention(AttentionConfig(hidden, heads, **settings), context, rng_site, **own)


def make_mlp(hidden: int, ffn: int, **settings: Any) -> ParallelMLP:
    context = ShardContext(**_fields(settings, ShardContext))
    return ParallelMLP(MLPConfig(hidden, ffn, **settings), context)


def make_layer(hidden: int, heads: int, ffn: int, rng_site: str, **settings: Any) -> ParallelTransformerLayer:
    context = ShardContext(**_fields(settings, ShardContext))
    return ParallelTransformerLayer(layer_config(hidden, heads, ffn, **settings), context, rng_site)


def make_decoder_layer(hidden: int, heads: int, ffn: int, rng_site: str, **settings: Any) -> ParallelDecoderLayer:
    context = ShardContext(**_fields(settings, ShardContext))
    return ParallelDecoderLayer(layer_config(hidden, heads, ffn, **settings), context, rng_site)


def layer_config(hidden: int, heads: int, ffn: int, **settings: Any) -> LayerConfig:
    """attention_dropout is the attention's, dropout the layer's; bias and stds are of both."""
    shared = {k: v for k, v in settings.items() if k in ("bias", "init_std", "output_std")}
    dropout = {"dropout": settings.pop("attention_dropout", 0.0)}
    of_layer = _fields(settings, LayerConfig)
    of_mlp = {k: v for k, v in settings.items() if k == "activation"}
    of_attention = {k: v for k, v in settings.items() if k not in (*of_mlp, *shared)}
    return LayerConfig(
        AttentionConfig(hidden, heads, **of_attention, **shared, **dropout),
        MLPConfig(hidden, ffn, **of_mlp, **shared),
        **of_layer,
    )


def _fields(settings: dict[str, Any], config: type) -> dict[str, Any]:
    return _taken(settings, *[field.name for field in fields(config)])


def _taken(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: settings.pop(name) for name in names if name in settings}
