"""Activations computed again in backward instead of kept (arXiv 1604.06174; 2205.05198, section 5).

full: a layer keeps its input, 2bsh bytes in 16 bit, for one more forward in backward. selective:
the attention core alone, whose scores cost 5as/h bytes per element of [b, s, h], few operations.
Noise is a function of (seed, step, place), so the second forward draws the masks of the first and
no generator state is saved or restored.

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

from mpctl.kernels.input_checkpoint import InputCheckpointer
from mpctl.transport.group import Group


def core(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs) that keeps its arguments and computes the rest again in backward.

    The hook of selective recomputation: q, k and v are views of one product (rotary makes new q
    and k), so that keeping them is all but free. The function must do
    the same twice, which stateless noise does.
    """
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def checkpointed(
    function: Callable[..., Tensor],
    hidden: Tensor,
    *args: Any,
    group: Group | None = None,
    partition: bool = False,
    offload: bool = False,
    **kwargs: Any,
) -> Tensor:
    """function(hidden, *args, **kwargs), keeping `hidden` alone, as `InputCheckpointer` says.

    partition needs a hidden equal on every rank of `group`; its backward then gathers it, one
    all-gather of the whole. Other arguments, masks and positions, are kept as they are.
    """
    if not torch.is_grad_enabled():
        return function(hidden, *args, **kwargs)
    keeper = InputCheckpointer(group or Group(), partition, offload)
    shape, device, wanted = hidden.shape, hidden.device, hidden.requires_grad
    first = [hidden]

    def run(kept: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The first time on the live input, which is then let go; later on the kept one."""
        again = first.pop() if first else keeper.restore(kept, shape, device)
        return function(again.requires_grad_(wanted), *args, **kwargs)

    result: Tensor = core(run, keeper.keep(hidden), *args, **kwargs)
    return result
