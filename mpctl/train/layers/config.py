"""The configuration of a transformer layer: its attention and MLP, norms, dropout, recomputation.

A config has neither the layout (`ShardContext`) nor the layer's number (its `rng_site`), so that
equal layers share one. Every value is checked when the config is made, except those that depend on
the number of ranks, which the split modules check.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from torch import nn

from mpctl.train.kernels.rotary import Rotary
from mpctl.train.layers.norm import Norm
from mpctl.train.layers.parameters import Init
from mpctl.train.layers.shard_context import ShardContext

NormOrder = Literal["pre", "post", "output", "sandwich"]
Recompute = Literal["none", "selective", "full"]


class InitialValues:
    """The initial values of a config's matrices, from its own init_std and output_std."""

    init_std: float
    output_std: float | None

    @property
    def init(self) -> Init:
        """Initial values of the matrices that read the hidden states."""
        return Init("normal", self.init_std)

    @property
    def output_init(self) -> Init:
        """Initial values of the matrices that write to the residual."""
        return Init("normal", self.output_std or self.init_std)


class SelfAttention(Protocol):
    """The self-attention of a layer: an AttentionConfig or a LatentAttentionConfig."""

    @property
    def hidden(self) -> int:
        """Features of a position, in and out."""

    @property
    def rotary(self) -> Rotary | None:
        """Rotary positions of queries and keys; None without."""

    def build(self, shard_context: ShardContext, rng_site: str, *, recompute: bool = False) -> nn.Module:
        """Return the module of this rank. Arguments are those of ParallelSelfAttention."""


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

    attention: SelfAttention
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
        check_probability("dropout", self.dropout)
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


def check_probability(name: str, value: float) -> None:
    """Raises ValueError for a value that is no probability below 1."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} {value} is not in 0 <= p < 1")


def check_known(name: str, value: str, known: Collection[str]) -> None:
    """Raises ValueError for a value that is not known."""
    if value not in known:
        raise ValueError(f"{name} {value!r} is not one of {', '.join(known)}")
