"""Norms of the residual stream in one kernel each way are torch's, with both gradients added."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpctl.train.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.train.kernels.triton import norms
from mpctl.train.kernels.triton.backend import TritonKernels
from tests.train.kernels.triton.bits import DTYPES, operations, random_tensor

CLOSE = {torch.float64: 1e-12, torch.float32: 2e-5}
Kernels = pytest.mark.parametrize("centred", [True, False], ids=["layernorm", "rmsnorm"])


def inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """x, branch, weight, bias and the bias of the branch."""
    shapes = [(2, rows, width)] * 2 + [(width,)] * 3
    return [random_tensor(shape, dtype, device, seed) for seed, shape in enumerate(shapes)]


def computed(
    kernels: KernelBackend, given: list[Tensor], *, centred: bool, adds: bool, summed: bool = False
) -> list[Tensor]:
    """Sum, norm and gradients, of which the sum's goes through the stream too."""
    x, branch, weight, bias, branch_bias = given
    total, y = kernels.residual_norm(
        x,
        branch if adds else None,
        weight,
        bias if centred else None,
        1e-5,
        centred=centred,
        **({"branch_bias": branch_bias} if summed else {}),
    )
    leaves = [x, weight, *[branch] * adds, *[bias] * centred, *[branch_bias] * summed]
    generator = torch.Generator().manual_seed(7)
    ends = (torch.randn(y.shape, generator=generator).to(y) for _ in range(2))
    return [total, y, *torch.autograd.grad((total, y), leaves, tuple(ends))]


@Kernels
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_are_torchs(dtype: torch.dtype, adds: bool, centred: bool, device: torch.device) -> None:
    """16 bits beside float64 of the same numbers: the sum is rounded once forward, once back."""
    given = inputs(3, 100, dtype, device)
    ours = computed(TritonKernels(), given, centred=centred, adds=adds)
    wide = [x.detach().double().requires_grad_() for x in given]
    theirs = computed(TORCH_BACKEND, wide, centred=centred, adds=adds)
    close = CLOSE.get(dtype, 4 * torch.finfo(dtype).eps)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), other, rtol=close, atol=2 * close)


@Kernels
def test_a_branchs_bias_gets_the_sums_of_the_streams_gradient(centred: bool, device: torch.device) -> None:
    given = inputs(40, 24, torch.float64, device)
    *_, dbias = computed(TritonKernels(), given, centred=centred, adds=True, summed=True)
    dx = computed(TORCH_BACKEND, given, centred=centred, adds=True)[2]
    torch.testing.assert_close(dbias, dx.sum((0, 1)), rtol=1e-12, atol=1e-12)


def test_programs_of_several_rows_sum_all_of_them(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """3 programs of 5 rows for 13, in the order of the rows: the sums have the bits of any."""
    monkeypatch.setattr(norms, "PROGRAMS", 3)
    given = inputs(13, 24, torch.float64, device)
    given[:2] = [x.detach()[:1].requires_grad_() for x in given[:2]]
    ours = computed(TritonKernels(), given, centred=True, adds=True)
    for mine, other in zip(ours, computed(TORCH_BACKEND, given, centred=True, adds=True), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@Kernels
def test_a_norm_is_one_kernel_and_two_backward(centred: bool) -> None:
    given = inputs(4, 64, torch.bfloat16, torch.device("meta"))
    names = operations(lambda: computed(TritonKernels(), given, centred=centred, adds=True))
    own = [name for name in names if name.startswith("mpctl")]
    assert own == ["mpctl::add_norm", "mpctl::norm_backward", "mpctl::column_sums"]
    assert not any(name in ("aten::add.Tensor", "aten::sum.dim_IntList") for name in names)


def test_a_norm_alone_has_its_gradient_and_rows_that_are_too_wide_are_torchs(device: torch.device) -> None:
    x, _, weight, bias, _ = inputs(3, 40, torch.float64, device)
    for kernels in (TritonKernels(), TORCH_BACKEND):
        y = kernels.layer_norm(x, weight, bias, 1e-5) + kernels.rms_norm(x, weight, 1e-5)
        grads = torch.autograd.grad(y.square().sum(), (x, weight, bias))
        torch.testing.assert_close(
            [each.sum() for each in grads],
            [
                torch.autograd.grad(
                    (TORCH_BACKEND.layer_norm(x, weight, bias, 1e-5) + TORCH_BACKEND.rms_norm(x, weight, 1e-5))
                    .square()
                    .sum(),
                    leaf,
                )[0].sum()
                for leaf in (x, weight, bias)
            ],
        )
    wide = torch.zeros(norms.WIDEST // 4 + 1, dtype=torch.bfloat16)
    assert not norms.fits(wide, wide) and norms.fits(wide[1:], wide[1:])
