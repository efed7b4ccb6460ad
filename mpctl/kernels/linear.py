"""Linear layers split over a group: Y = X W^T + b, with W [out, in].

Megatron-LM (arXiv 1909.08053, section 3, equations 1 to 3). By columns of the product (rows of W):
Y = X [A1 A2], no communication forward, f sums dX backward. By rows: Y = X1 A1 + X2 A2, g sums Y
forward; the bias is added once, after the sum. A column layer followed by a row layer costs one
all-reduce forward and one backward.

With sequence parallelism (arXiv 2205.05198, section 4.2.2) the pair takes and gives [b, s/t, .].
Messages of b*s*i or b*s*o whole: column, forward 1 all-gather, backward 1 all-gather (X again) and
1 reduce-scatter (dX); row, forward 1 reduce-scatter, backward 1 all-gather.

A fused output of several parts (q, k, v) is split part by part. Six columns in three parts, t=2:
rank 0 keeps columns 0, 2, 4 and rank 1 keeps 1, 3, 5.

Letters: b batch, s sequence, i in_features, o out_features, t ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mpctl.kernels.parameters import ZEROS, Init, Shard, mark_partial, shard_parameter
from mpctl.kernels.product import column_product
from mpctl.kernels.regions import (
    gather_from_region,
    reduce_from_region,
    scatter_sequence_sum,
    scatter_to_region,
)
from mpctl.sharding import local_range, local_size, split_parts
from mpctl.transport.group import Group

WEIGHTS = Init("normal", 0.02)
ALONE = Group()  # of a product whose sum, if it needs one, is made elsewhere


class ColumnParallelLinear(nn.Module):
    """[b, s, i] -> [b, s, o/t], or [b, s, o] with gather_output, in the unsharded order.

    stride: that many equal parts are fused in the output, each split by itself; parts: unequal
    ones. skip_bias_add returns (output, bias) for the caller to fuse. sequence_parallel takes
    [b, s/t, i], gathers it for the product and again in backward: only the shard is kept. Raises
    ValueError where a part does not divide by the group.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group,
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        stride: int = 1,
        parts: Sequence[int] | None = None,
        skip_bias_add: bool = False,
        init: Init = WEIGHTS,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if gather_output and skip_bias_add:
            raise ValueError(
                "gather_output and skip_bias_add: the bias would stay split (drop one)"
            )
        self.group, self.gather_output, self.skip_bias_add = group, gather_output, skip_bias_add
        self.sequence_parallel = sequence_parallel
        self.parts = _checked_parts(out_features, stride, parts)
        self.in_features, self.out_features = in_features, out_features
        own = split_parts(self.parts, parts=group.size, index=group.rank)
        self.weight = shard_parameter(
            Shard((out_features, in_features), 0, own), init=init, dtype=dtype, device=device
        )
        self.bias = (
            shard_parameter(Shard((out_features,), 0, own), init=ZEROS, dtype=dtype, device=device)
            if bias
            else None
        )

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        # [b, s, i] or [b, s/t, i] -> [b, s, o/t]
        output = column_product(
            x,
            self.weight,
            None if self.skip_bias_add else self.bias,
            group=self.group,
            sequence_parallel=self.sequence_parallel,
        )
        if self.skip_bias_add:
            return output, self.bias
        return self._gathered(output) if self.gather_output else output

    def _gathered(self, output: Tensor) -> Tensor:
        # [b, s, o/t] -> [b, s, o]
        whole = gather_from_region(output, self.group)
        if self.group.size == 1 or len(self.parts) == 1:
            return whole
        held = [
            column
            for rank in range(self.group.size)
            for block in split_parts(self.parts, parts=self.group.size, index=rank)
            for column in block
        ]
        return whole.index_select(-1, torch.tensor(held, device=whole.device).argsort())

    def extra_repr(self) -> str:
        local = f"{self.in_features} -> {self.weight.shape[0]} of {self.out_features}"
        fused = f", parts={self.parts}" if len(self.parts) > 1 else ""
        return f"{local}{fused}, bias={self.bias is not None}, t={self.group.size}"


class RowParallelLinear(nn.Module):
    """[b, s, i/t] -> [b, s, o], summed over the group; the bias, replicated, is added once.

    input_is_parallel=False takes [b, s, i] and keeps this rank's block of it. skip_bias_add
    returns (output, bias). sequence_parallel gives [b, s/t, o], this rank's positions of the sum;
    the bias then sees these only, and is marked so. Raises ValueError where in_features does not
    divide by the group.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group,
        bias: bool = True,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        skip_bias_add: bool = False,
        init: Init = WEIGHTS,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.group, self.skip_bias_add = group, skip_bias_add
        self.input_is_parallel, self.sequence_parallel = input_is_parallel, sequence_parallel
        self.in_features, self.out_features = in_features, out_features
        own = local_range(in_features, parts=group.size, index=group.rank)
        self.weight = shard_parameter(
            Shard((out_features, in_features), 1, (own,)), init=init, dtype=dtype, device=device
        )
        self.bias = (
            shard_parameter(Shard((out_features,)), init=ZEROS, dtype=dtype, device=device)
            if bias
            else None
        )
        if self.bias is not None and sequence_parallel:
            mark_partial(self.bias)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        if not self.input_is_parallel:
            x = scatter_to_region(x, self.group)
        if self.group.size == 1 and not self.skip_bias_add:
            return column_product(x, self.weight, self.bias, group=ALONE)
        output = self._summed(column_product(x, self.weight, group=ALONE))
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output.add_(self.bias)

    def _summed(self, partial: Tensor) -> Tensor:
        # [b, s, o] partial -> [b, s/t, o] or [b, s, o] summed
        if self.sequence_parallel:
            return scatter_sequence_sum(partial, self.group)
        return reduce_from_region(partial, self.group, owned=True)

    def extra_repr(self) -> str:
        local = f"{self.weight.shape[1]} of {self.in_features} -> {self.out_features}"
        return f"{local}, bias={self.bias is not None}, t={self.group.size}"


def _checked_parts(out_features: int, stride: int, parts: Sequence[int] | None) -> tuple[int, ...]:
    if parts is None:
        return (local_size(out_features, parts=stride),) * stride
    if stride != 1 or sum(parts) != out_features:
        raise ValueError(f"parts {tuple(parts)} must sum to {out_features}, and stride stay 1")
    return tuple(parts)
