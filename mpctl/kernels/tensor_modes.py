"""Which class makes the split modules of each mode of tensor parallelism (tensor_parallel.py)."""

from __future__ import annotations

from collections.abc import Callable

from mpctl.kernels.grid.layers import GridTensorParallel
from mpctl.kernels.tensor_parallel import ShardContext, TensorParallel, TensorParallel1D
from mpctl.tensor_grid import TensorGrid
from mpctl.transport.group import Group

_MODES: dict[str, Callable[[ShardContext], TensorParallel]] = {
    "1d": TensorParallel1D,
    "2d": GridTensorParallel,
    "2.5d": GridTensorParallel,
    "3d": GridTensorParallel,
}


def tensor_parallel_of(mode: str) -> Callable[[ShardContext], TensorParallel]:
    """What makes a mode's modules; mode: `parallel.tensor_mode`."""
    return _MODES[mode]


def planned_groups(grid: TensorGrid, rank: int) -> dict[str, Group]:
    """The groups of tp rank `rank` in its grid, by name, without process groups: enough to build
    modules, not to run them.

    >>> groups = planned_groups(TensorGrid.of("2.5d", 8), 6)
    >>> {name: (group.rank, group.size) for name, group in groups.items()}
    {'col': (0, 2), 'row': (1, 2), 'depth': (1, 2), 'row-depth': (3, 4)}
    """
    coords, groups = grid.coords(rank), {}
    for name, axes in grid.groups.items():
        place, size = 0, 1
        for axis in axes:
            place, size = place + size * coords[axis], size * grid.axes[axis]
        groups[name] = Group(place, size, name=name)
    return groups
