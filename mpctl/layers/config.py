"""The configuration of a transformer layer: widths, heads, norms, dropout, recomputation.

A config has neither the layout (`ShardContext`) nor the layer's number (its `rng_site`), so that
equal layers share one. Every value is checked when the config is made, except those that depend on
the number of ranks, which the split modules check.

>>> attention = AttentionConfig(hidden=1024, heads=16, kv_heads=4)
>>> attention.head_size, attention.queries_per_kv_head
(64, 4)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

from torch import nn

from mpctl.kernels.rotary import Rotary
from mpctl.layers.norm import Norm
from mpctl.layers.parameters import Init
from mpctl.layers.shard_context import ShardContext
from mpctl.sharding import local_size

NormOrder = Literal["pre", "post", "output", "sandwich"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class AttentionConfig:
    """Multi-head attention over `hidden` features.

    kv_heads: heads of keys and values, each shared by heads / kv_heads queries (grouped-query
    attention, arXiv 2305.13245); as many as heads by default. head_dim: features of a head, hidden
    / heads by default. causal: a query sees keys at its own and earlier positions only. scale:
    factor of the scores, 1 / sqrt(head_dim) by default. dropout: probability of dropping an
    attention weight. rotary: rotary positions of queries and keys. window: number of keys that a
    causal query sees, including its own; all by default. alibi: whether scores fall with the
    distance (ALiBi). qk_norm: kind of the norms of queries and keys, none by default; they are over
    each head, or with norms_width over all heads together; eps: that of these norms. bias: whether
    the projections have biases; output_bias: the output's, as bias by default. init_std: standard
    deviation of initial weights; output_std, query_std: those of the output and the query
    projection, init_std by default.

    Raises ValueError where heads do not divide hidden (and head_dim is not given), kv_heads do not
    divide heads, or a value is out of its range.
    """

    hidden: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    causal: bool = True
    scale: float | None = None
    dropout: float = 0.0
    rotary: Rotary | None = None
    window: int | None = None
    alibi: bool = False
    qk_norm: Norm | None = None
    norms_width: bool = False
    eps: float = 1e-5
    bias: bool = True
    output_bias: bool | None = None
    init_std: float = 0.02
    output_std: float | None = None
    query_std: float | None = None

    def __post_init__(self) -> None:
        check_positive(hidden=self.hidden, heads=self.heads, kv_heads=self.num_kv_heads)
        check_positive(head_dim=self.head_size)
        _check_probability("attention dropout", self.dropout)
        local_size(self.heads, parts=self.num_kv_heads)
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError(f"window {self.window}: it is 1 or more, of causal attention")
        if self.rotary is not None and self.rotary.head_dim != self.head_size:
            raise ValueError(
                f"rotary positions of {self.rotary.head_dim} features for heads of "
                f"{self.head_size} (make it with Rotary({self.head_size}))"
            )

    @property
    def init(self) -> Init:
        """Initial values of the matrices that read the hidden states."""
        return Init("normal", self.init_std)

    @property
    def query_init(self) -> Init:
        """Initial values of the matrix that makes queries."""
        return Init("normal", self.query_std or self.init_std)

    @property
    def qkv_init(self) -> Init:
        """Initial values of queries', keys' and values' matrices, stacked in this order."""
        if self.query_std is None:
            return self.init
        return replace(self.init, first=(self.heads * self.head_size, self.query_std))

    @property
    def output_init(self) -> Init:
        """Initial values of the matrix that writes to the residual."""
        return Init("normal", self.output_std or self.init_std)

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        """Features of one head."""
        if self.head_dim is not None:
            return self.head_dim
        return local_size(self.hidden, parts=self.heads)

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share a key-value head."""
        return self.heads // self.num_kv_heads


class FeedForward(Protocol):
    """The feed-forward part of a layer: an MLPConfig or a configuration of another module. Layers
    of one stack may have different ones."""

    @property
    def hidden(self) -> int:
        """Features of a position, in and out."""

    def build(self, shard_context: ShardContext, name: str) -> nn.Module:
        """The module of this rank: [b, s, h] -> [b, s, h] between layers. name: its global name,
        `layers.7.mlp`."""


@dataclass(frozen=True)
class LayerConfig:
    """A transformer layer: attention and MLP, each with a norm, dropout and a residual sum.

    eps: added to the norms' variance. norm_order: norms before attention and MLP (pre), after the
    residual sums (post), of the results of attention and MLP (output), before and of the results
    (sandwich). dropout: of both branches, before they are added. recompute: what backward computes
    again instead of keeping it: nothing (none), attention scores (selective) or all but the layer's
    input (full). With full, partition_activations keeps 1/t of that input on each tensor-parallel
    rank, and offload_activations keeps it in host memory. parallel_residual: attention and MLP both
    read the layer's input; shared_norm: through one norm.

    Raises ValueError for an unknown name, for widths that differ, and where partition_activations
    or offload_activations is set without recompute full.
    """

    attention: AttentionConfig
    mlp: FeedForward
    norm: Norm = "layernorm"
    eps: float = 1e-5
    norm_order: NormOrder = "pre"
    dropout: float = 0.0
    recompute: Recompute = "none"
    partition_activations: bool = False
    offload_activations: bool = False
    parallel_residual: bool = False
    shared_norm: bool = False

    def __post_init__(self) -> None:
        if self.parallel_residual and self.norm_order != "pre":
            raise ValueError(f"norm_order {self.norm_order}: parallel_residual has norms before")
        check_known("norm", self.norm, get_args(Norm))
        check_known("norm_order", self.norm_order, get_args(NormOrder))
        check_known("recompute", self.recompute, get_args(Recompute))
        _check_probability("dropout", self.dropout)
        if self.attention.hidden != self.mlp.hidden:
            raise ValueError(
                f"attention of hidden size {self.attention.hidden} and MLP of {self.mlp.hidden}: "
                "a layer has one hidden size (make them equal)"
            )
        if (self.partition_activations or self.offload_activations) and self.recompute != "full":
            raise ValueError(
                f"recompute {self.recompute}: partition_activations and offload_activations keep "
                "the input of a layer that is recomputed (set recompute to full)"
            )

    @property
    def hidden(self) -> int:
        """Features of a position, h."""
        return self.attention.hidden


def check_positive(**values: int) -> None:
    """Raises ValueError for a value below 1."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} {value} is below 1")


def _check_probability(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} {value} is not in 0 <= p < 1")


def check_known(name: str, value: str, known: Collection[str]) -> None:
    """Raises ValueError for a value that is not known."""
    if value not in known:
        raise ValueError(f"{name} {value!r} is not one of {', '.join(known)}")
