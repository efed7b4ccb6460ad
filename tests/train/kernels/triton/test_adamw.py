"""AdamW over many tensors in one kernel makes torch's update, and the copies of the values."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mpctl.train.kernels.adamw import AdamWStep, torch_adamw
from mpctl.train.kernels.triton.adamw import CHUNK, fits
from mpctl.train.kernels.triton.backend import TritonKernels
from tests.train.kernels.triton.bits import operations

SHAPES = ((CHUNK + 4464,), (3, 5), (17,), (0,))
COUNTS = (0.0, 3.0, 1000.0, 3.0)


@dataclass
class Scale:
    """What a step is told on the device."""

    grad_scale: float | None = None
    found_inf: float | None = None

    def step(self, device: torch.device, copies: torch.dtype | None = torch.bfloat16) -> AdamWStep:
        given = (None if x is None else torch.tensor(x, device=device) for x in (self.grad_scale, self.found_inf))
        generator = torch.Generator().manual_seed(1)

        def drawn(factor: float) -> list[Tensor]:
            return [(torch.randn(shape, generator=generator) * factor).to(device) for shape in SHAPES]

        return AdamWStep(
            drawn(1.0),
            drawn(1.0),
            drawn(0.1),
            [x.square() for x in drawn(0.1)],
            [torch.tensor(count, device=device) for count in COUNTS],
            [] if copies is None else [torch.zeros(s, dtype=copies, device=device) for s in SHAPES],
            1e-3,
            0.1,
            0.9,
            0.95,
            1e-8,
            *given,
        )


@pytest.mark.parametrize("scale", [Scale(), Scale(3.0, 0.0), Scale(0.5)])
@pytest.mark.parametrize("copies", [torch.bfloat16, torch.float16, None])
def test_an_update_is_torchs(scale: Scale, copies: torch.dtype | None, device: torch.device) -> None:
    """Float32 of a different order of operations; what is near 0 is a difference of larger ones."""
    ours, theirs = scale.step(device, copies), scale.step(device, copies)
    assert TritonKernels().adamw(ours)
    torch_adamw(theirs)
    for name in ("values", "averages", "squares", "updates"):
        for mine, other in zip(getattr(ours, name), getattr(theirs, name), strict=True):
            torch.testing.assert_close(mine, other, rtol=2e-6, atol=2e-7)
    for copy, value in zip(ours.copies, ours.values, strict=bool(ours.copies)):
        assert torch.equal(copy, value.to(copy.dtype))


def test_nothing_changes_where_a_gradient_is_not_finite(device: torch.device) -> None:
    step, before = Scale(1.0, 1.0).step(device), Scale(1.0, 1.0).step(device)
    step.gradients[0][5] = torch.inf
    TritonKernels().adamw(step)
    for name in ("values", "averages", "squares", "updates", "copies"):
        for mine, other in zip(getattr(step, name), getattr(before, name), strict=True):
            assert torch.equal(mine, other)


def test_many_tensors_are_one_kernel_beside_those_of_the_counts() -> None:
    step = Scale(1.0, 0.0).step(torch.device("meta"))
    names = operations(lambda: TritonKernels().adamw(step))
    assert names == ["aten::_foreach_add_.Scalar", "mpctl::adamw_", "aten::_foreach_sub_.List"]


def test_what_the_kernel_does_not_take_is_torchs(device: torch.device) -> None:
    step = Scale().step(device)
    wide = step._replace(values=[x.double() for x in step.values])
    apart = step._replace(gradients=[step.gradients[0].repeat(2)[::2], *step.gradients[1:]])
    some = step._replace(copies=step.copies[:1])
    assert fits(step) and not any(map(fits, (wide, apart, some)))
    assert not TritonKernels().adamw(some)
