"""Modules that every tensor-parallel rank holds whole: lookup tables and small linear layers.

Position and segment tables, BERT's pooler and classifier: too small to split. Under sequence
parallelism each rank feeds them its own positions only, so that their gradients are partial sums
(parameters.mark_partial).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.kernels.masks import Positions
from mpctl.kernels.parameters import ZEROS, Init, shard_parameter
from mpctl.shard import Shard


class ReplicatedTable(nn.Module):
    """A lookup table of n rows [n, h]: positions, segments. shard: the part of it that this rank
    holds, all by default."""

    def __init__(
        self,
        rows: int,
        hidden: int,
        *,
        init: Init,
        shard: Shard | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        own = Shard((rows, hidden)) if shard is None else shard
        self.weight = shard_parameter(own, init=init, dtype=dtype, device=device)

    def forward(self, rows: Positions) -> Tensor:
        """The rows of a range, [s, h], or those that an integer tensor [..] names, [.., h]."""
        weight: Tensor = self.weight
        if isinstance(rows, range):
            return weight[rows.start : rows.stop]
        # an accelerator adds the gradients of an index by atomics, which two rows make wait
        return weight[rows] if weight.device.type == "cpu" else F.embedding(rows, weight)


class ReplicatedLinear(nn.Module):
    """x [.., i] -> x W^T + b [.., o]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        init: Init,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.weight = shard_parameter(
            Shard((out_features, in_features)), init=init, dtype=dtype, device=device
        )
        self.bias = shard_parameter(Shard((out_features,)), init=ZEROS, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., in_features] -> [.., out_features], with the bias added; no communication."""
        return F.linear(x, self.weight, self.bias)
