"""Which class makes the split modules of each mode of tensor parallelism (tensor_parallel.py)."""

from __future__ import annotations

from collections.abc import Callable

from mpctl.kernels.tensor_parallel import ShardContext, TensorParallel, TensorParallel1D

_MODES: dict[str, Callable[[ShardContext], TensorParallel]] = {"1d": TensorParallel1D}


def tensor_parallel_of(mode: str) -> Callable[[ShardContext], TensorParallel]:
    """What makes a mode's modules; mode: `parallel.tensor_mode`. Raises KeyError for a mode that is
    only planned."""
    return _MODES[mode]
