"""The layers of the recurrent families, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.families.implementation import Batch, FamilyImplementation
from mpctl.train.families.parts import layer_config, mlp_config
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.layers.config import LayerConfig
from mpctl.train.layers.mlp import MLPConfig, ParallelMLP
from mpctl.train.layers.shard_context import ShardContext

from .module import Toy
from .recurrent import SCANS
from .samples import ToySamples


class _Scan(torch.autograd.Function):
    """y = P cumsum((1 - a) v / P) with P = cumprod(a); its adjoint sums from the end."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        decay = torch.sigmoid(gate)
        product = decay.cumprod(1)
        y = decay.neg_().add_(1).mul_(value).div_(product).cumsum(1).mul_(product)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        gate, value = x.chunk(2, -1)
        decay = torch.sigmoid(gate)
        product = decay.cumprod(1)
        sums = (dy * product).flip(1).cumsum(1).flip(1).div_(product)  # of what follows each position
        before = torch.cat((torch.zeros_like(y[:, :1]), y[:, :-1]), 1).sub_(value).mul_(sums)
        slope = decay * (1 - decay)
        return torch.cat((before.mul_(slope), sums.mul_(decay.neg_().add_(1))), -1)


class Between(ParallelMLP):
    """Two products with the recurrence between them, gelu, or nothing."""

    def __init__(self, config: BranchConfig, shard_context: ShardContext) -> None:
        super().__init__(config, shard_context)
        self.between = config.between

    def forward(self, x: Tensor, rng: CounterRNG | None = None, cos_sin: None = None, **how: bool) -> Tensor:
        return super().forward(x, **how)

    def _activated(self, x: Tensor) -> Tensor:
        if self.between == "gelu":
            return super()._activated(x)
        up = self.up(x)
        return cast(Tensor, _Scan.apply(up)) if self.between == "scan" else up


@dataclass(frozen=True)
class BranchConfig(MLPConfig):
    """In the place of an attention or of an MLP."""

    between: str = ""
    rotary: ClassVar[None] = None

    def build(self, shard_context: ShardContext, name: str = "", *, recompute: bool = False) -> Between:
        return Between(self, shard_context)


class Recurrent(Toy):
    """A toy without parities and without attention."""

    FAMILY: ClassVar[str]

    def tables(self, model: ModelSpec) -> Mapping[str, int]:
        return {}

    def embed(self, batch: Batch, rng: CounterRNG | None) -> Tensor:
        assert self.embedding is not None
        return self.embedding.dropped(self.embedding(batch["tokens"]), rng)

    def layer_config(self, training: TrainingSpec, layer: int) -> LayerConfig:
        own = mlp_config(self.model, training)
        first, second = (
            BranchConfig(
                own.hidden, own.ffn, "swiglu" if kind == "scan" else "gelu", False, own.init_std, own.output_std, kind
            )
            for kind in SCANS[self.FAMILY]
        )
        return replace(layer_config(self.model, training, causal=True), attention=first, mlp=second)


def implementation(family: str) -> FamilyImplementation:
    """The module of one of the families."""
    module: type[nn.Module] = type("Recurrent", (Recurrent,), {"FAMILY": family})
    return FamilyImplementation(module=cast(Any, module), samples=ToySamples)


RECURRENT, LINEAR, MLP_FIRST = (implementation(family) for family in SCANS)
