"""AdamW (arXiv 1711.05101) with torch's fused kernel, one call for each group of tensors.

The arithmetic and the state are those of `torch.optim.AdamW(fused=True)`, bit for bit. Creating an
object of that class imports torch._dynamo, which costs each rank more than a second of processor
time at its start; the function that it calls, `torch.optim.adamw.adamw`, does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class ParameterGroup:
    """Tensors that are stepped with the same weight decay."""

    values: Sequence[Tensor]
    weight_decay: float


@dataclass
class AdamW:
    """Steps the values of its groups by their `.grad`. beta1, beta2, epsilon: as in the paper.

    state: of each value that was stepped, its MOMENTS (tensors like the value) and `step`, a tensor
    with the number of updates that they have seen; absent before the first step.
    """

    groups: Sequence[ParameterGroup]
    beta1: float
    beta2: float
    epsilon: float
    state: dict[Tensor, dict[str, Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def step(
        self, rate: float, *, grad_scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        """Update every value that has a gradient; rate: the learning rate.

        grad_scale, found_inf: float32 scalars on the device of the values. Gradients are divided by
        the first, in place; where the second is 1, values, moments and counts stay as they are.
        """
        for group in self.groups:
            values = [value for value in group.values if value.grad is not None]
            states = [self._state_of(value) for value in values]
            adamw(
                values,
                [value.grad for value in values if value.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                grad_scale=grad_scale,
                found_inf=found_inf,
                amsgrad=False,
                beta1=self.beta1,
                beta2=self.beta2,
                lr=rate,
                weight_decay=group.weight_decay,
                eps=self.epsilon,
                maximize=False,
            )

    def _state_of(self, value: Tensor) -> dict[str, Tensor]:
        """The state of a value, created with moments of 0 at its first step."""
        if value not in self.state:
            self.state[value] = {
                "step": torch.zeros((), dtype=torch.float32, device=value.device),
                **{name: torch.zeros_like(value) for name in MOMENTS},
            }
        return self.state[value]
