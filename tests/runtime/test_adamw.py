"""AdamW against torch's own class: the same bits, in values and state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mpctl.runtime.optimizer import MOMENTS, AdamW, ParameterGroup

RATES = (1e-3, 2e-3, 5e-4)


def _values() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in ((5, 3), (7,), (2, 2))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_moments_are_those_of_torch(dtype: torch.dtype) -> None:
    ours, theirs = ([nn.Parameter(v.to(dtype)) for v in _values()] for _ in range(2))
    adam = AdamW([ParameterGroup(ours[:1], 0.1), ParameterGroup(ours[1:], 0.0)], 0.9, 0.95, 1e-8)
    torch_adam = torch.optim.AdamW(
        [
            {"params": theirs[:1], "weight_decay": 0.1},
            {"params": theirs[1:], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=True,
    )
    for step, rate in enumerate(RATES, start=1):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.sin(torch.arange(mine.numel()).view_as(mine) * step).to(dtype)
            other.grad = mine.grad.clone()
        for group in torch_adam.param_groups:
            group["lr"] = rate
        adam.step(rate)
        torch_adam.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        assert all(torch.equal(adam.state[mine][n], torch_adam.state[other][n]) for n in MOMENTS)
        assert float(adam.state[mine]["step"]) == len(RATES)


def test_a_value_without_a_gradient_is_left_alone() -> None:
    value = nn.Parameter(torch.ones(3))
    adam = AdamW([ParameterGroup([value], 0.1)], 0.9, 0.95, 1e-8)
    adam.step(1e-3)
    assert torch.equal(value, torch.ones(3)) and not adam.state
