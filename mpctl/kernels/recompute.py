"""Activations computed again in backward instead of kept (arXiv 1604.06174; 2205.05198, section 5).

full: a layer keeps its input, 2bsh bytes in 16 bit, for one more forward in backward. selective:
the attention core alone, whose scores cost 5as/h bytes per element of [b, s, h], few operations.
Dropout is a function of (seed, step, position) (counter_rng.py), so the second forward draws the
masks of the first and no generator state is saved or restored.

The second forward ends at the last tensor that backward asks for. A layer with dropout needs the
last mask, and a post-norm layer its last norm's input, so these run to their end; otherwise the
product of the last row layer and its reduction are left out: of the 2 collectives of a layer (4
under sequence parallelism) 1 is saved.

By hand, y = f(x) = exp(exp(x)): plain autograd keeps exp(x) and y, checkpointed keeps x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mpctl.kernels.host_offload import HostOffload
from mpctl.kernels.input_checkpoint import InputCheckpointer
from mpctl.transport.group import Group


def recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), of which only the arguments are kept: backward calls it again.

    The function must compute the same at both calls, as `CounterRNG` does; no generator state is
    saved. For selective recomputation of attention: q, k and v are views of one product (rotary
    positions make new q and k), so that keeping them costs next to nothing.
    """
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def checkpointed(
    function: Callable[..., Tensor],
    hidden: Tensor,
    *args: Any,
    group: Group | None = None,
    partition: bool = False,
    offload: HostOffload | None = None,
    **kwargs: Any,
) -> Tensor:
    """function(hidden, *args, **kwargs), of which `hidden` alone is kept; backward calls it again.

    partition: keep 1/t of hidden, which must be equal on every rank of `group`; backward gathers
    it, one all-gather of the whole message. offload: keeps it in host memory (host_offload.py).
    Other arguments, masks and positions, are kept as they are. Without gradients nothing is kept.
    """
    if not torch.is_grad_enabled():
        return function(hidden, *args, **kwargs)
    checkpointer = InputCheckpointer(group or Group(), partition, offload)
    shape, requires_grad = hidden.shape, hidden.requires_grad
    live = [hidden]

    def run(saved: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """In forward on the live input, which is then released; in backward on the saved one."""
        restored = live.pop() if live else checkpointer.restore(saved, shape)
        return function(restored.requires_grad_(requires_grad), *args, **kwargs)

    result: Tensor = recomputed(run, checkpointer.save(hidden), *args, **kwargs)
    return result
