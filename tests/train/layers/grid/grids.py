"""The grids that tests run on, a rank's context in one, and its part of inputs and results.

What a rank returns is a tensor with the shard that says which part of the whole it is: parameters
and activations alike. `compared` puts the parts of all ranks together; parts that several ranks
hold must agree.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpctl.core.shard import Shard
from mpctl.core.sharding import split_parts
from mpctl.core.tensor_grid import TensorGrid
from mpctl.core.topology import Topology
from mpctl.train.layers.grid.tensor_parallel import tensor_parallel_of
from mpctl.train.layers.parameters import partial_kind, take
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.transport.timing import Collective
from tests.threads import group_of
from tests.train.layers.oracle import Part, close, gradients, numbers, whole

Where = tuple[str, int, int | None]  # mode, ranks, depth

GRIDS: dict[str, Where] = {
    "2d-4": ("2d", 4, None),
    "2d-9": ("2d", 9, None),
    "2.5d-4": ("2.5d", 4, 1),
    "2.5d-8": ("2.5d", 8, 2),
    "3d-8": ("3d", 8, None),
}
# One grid of each kind at once, the others with the slow tests.
EACH = [
    pytest.param(where, id=name, marks=pytest.mark.slow if name in ("2d-9", "2.5d-4") else ())
    for name, where in GRIDS.items()
]
ONE = ShardContext(dtype=torch.float64)


def grid_of(where: Where) -> TensorGrid:
    return TensorGrid.of(*where)


def grid_context(
    where: Where, rank: int, log: list[Collective] | None = None, dtype: torch.dtype = torch.float64
) -> ShardContext:
    """Of a rank of a run that has as many ranks as the grid."""
    grid, groups = grid_of(where), {}
    topology = Topology.of({"tp": grid.size}).factored("tp", grid.axes)
    for name, axes in grid.groups.items():
        ranks = next(ranks for ranks in topology.groups(*axes) if rank in ranks)
        groups[name] = group_of(rank, ranks, name, log)
    tp = group_of(rank, range(grid.size), "tp", log)
    mode = tensor_parallel_of(grid.mode)
    return ShardContext(tp, dtype=dtype, tensor_parallel=mode, grid=grid, groups=groups)


def activation(
    context: ShardContext, shape: tuple[int, ...], *, inside: bool = False, parts: tuple[int, ...] = ()
) -> Shard:
    """What the rank holds of activations [b, s, h] or of losses [b, s]. parts: sizes of fused
    features, each cut by itself."""
    grid, place = context.grid, context.grid.coords(context.tp.rank)
    cuts = {0: (grid.block(shape[0], grid.sample_axes(inside=inside), place),)}
    if len(shape) == 3:
        axes = grid.feature_axes if inside else grid.hidden_axes
        index = grid.block(grid.parts(axes), axes, place).start
        cuts[2] = split_parts(parts or shape[2:], parts=grid.parts(axes), index=index)
    return Shard(shape, cuts)


def held(context: ShardContext, *shape: int, seed: int) -> Tensor:
    """The rank's part of test data between layers."""
    return take(activation(context, shape), numbers(*shape, seed=seed)).to(context.dtype)


def summed_gradients(module: nn.Module, context: ShardContext) -> dict[str, Part]:
    """As training has them once a step: partial sums are added over their group."""
    for _, parameter in sorted(module.named_parameters()):
        if kind := partial_kind(parameter):
            parameter.grad = context.groups[kind].all_reduce(parameter.grad)
    return gradients(module)


def passed(context: ShardContext, module: nn.Module, shape: tuple[int, int, int], *args: Any) -> dict[str, Part]:
    """Forward and backward of a module between layers: its result and all gradients."""
    x = held(context, *shape, seed=8).requires_grad_()
    y = module(x, *args)
    y.backward(held(context, *shape, seed=9))
    assert x.grad is not None
    own = activation(context, shape)
    return {"y": (y.detach(), own), "dx": (x.grad, own), **summed_gradients(module, context)}


def compared(ranks: list[dict[str, Part]], alone: dict[str, Part], bound: float = 1e-10) -> None:
    """All ranks together have what one has alone. A table may have more rows that only pad it."""
    for name, (expected, _) in alone.items():
        together = whole([rank[name] for rank in ranks])
        rows = min(len(together), len(expected))
        close(together[:rows], expected[:rows], bound)
        assert not together[rows:].any() and not expected[rows:].any()
    assert all(rank.keys() == alone.keys() for rank in ranks)
