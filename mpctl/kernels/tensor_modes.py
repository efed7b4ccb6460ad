"""Which class makes the split modules of each mode of tensor parallelism (tensor_parallel.py)."""

from __future__ import annotations

from collections.abc import Callable

from mpctl.kernels.grid.layers import GridTensorParallel
from mpctl.kernels.tensor_parallel import ShardContext, TensorParallel, TensorParallel1D

_MODES: dict[str, Callable[[ShardContext], TensorParallel]] = {
    "1d": TensorParallel1D,
    "2d": GridTensorParallel,
    "2.5d": GridTensorParallel,
    "3d": GridTensorParallel,
}


def tensor_parallel_of(mode: str) -> Callable[[ShardContext], TensorParallel]:
    """What makes a mode's modules; mode: `parallel.tensor_mode`."""
    return _MODES[mode]
