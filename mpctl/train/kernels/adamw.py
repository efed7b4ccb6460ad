"""An update by AdamW (arXiv 1711.05101) of tensors with one weight decay.

The arithmetic and the state are those of `torch.optim.AdamW(fused=True)`, bit for bit. Creating an
object of that class imports torch._dynamo, which costs each rank more than a second of processor
time at its start; the function that it calls, `torch.optim.adamw.adamw`, does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class AdamWStep(NamedTuple):
    """Tensors and settings of an update.

    averages, squares: the moments. updates: float32 scalars, numbers of updates in the
    moments, incremented by the update. copies: of the values in the model's dtype, which a kernel
    may write too; empty if the model computes with the values. rate: the learning rate. grad_scale,
    found_inf: float32 scalars on the device; gradients are divided by grad_scale, possibly in
    place, and nothing changes where found_inf is 1.
    """

    values: Sequence[Tensor]
    gradients: Sequence[Tensor]
    averages: Sequence[Tensor]
    squares: Sequence[Tensor]
    updates: Sequence[Tensor]
    copies: Sequence[Tensor]
    rate: float
    weight_decay: float
    beta1: float
    beta2: float
    epsilon: float
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


@torch.no_grad()
def torch_adamw(step: AdamWStep) -> None:
    """Make the update by torch's fused kernel; copies are not written."""
    adamw(
        list(step.values),
        list(step.gradients),
        list(step.averages),
        list(step.squares),
        [],
        list(step.updates),
        fused=True,
        grad_scale=step.grad_scale,
        found_inf=step.found_inf,
        amsgrad=False,
        beta1=step.beta1,
        beta2=step.beta2,
        lr=step.rate,
        weight_decay=step.weight_decay,
        eps=step.epsilon,
        maximize=False,
    )
