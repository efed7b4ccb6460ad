"""The loss and its gradient by three kernels are those of torch's blocks of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpctl.train.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.train.kernels.triton.backend import TritonKernels
from mpctl.train.layers.cross_entropy import vocab_parallel_cross_entropy
from mpctl.train.transport.group import Group
from tests.train.kernels.triton.bits import DTYPES, operations, random_tensor, same_bits

ALONE = Group()
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6}


def results(backend: KernelBackend, dtype: torch.dtype, overwrite: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Losses of [2, 3] rows of 5000 words and 120 columns of padding, and the gradient of the
    logits."""
    words = random_tensor((2, 3, 5000), dtype, device, 1).detach()
    given = F.pad(words, (0, 120), value=7.0).requires_grad_()
    targets = torch.tensor([[1, 4999, -100], [9000, 40, 0]], device=device)
    losses = vocab_parallel_cross_entropy(
        given * 3, targets, group=ALONE, first=0, words=5000, overwrite=overwrite, backend=backend
    )
    weights = torch.tensor([[0.5, 2.0, 1.0], [0.25, -1.0, 0.0]], device=device)
    return losses.detach(), *torch.autograd.grad((losses * weights).sum(), given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("overwrite", [False, True])
def test_losses_and_gradients_are_the_references(dtype: torch.dtype, overwrite: bool, device: torch.device) -> None:
    (loss, gradient), (expected, reference) = (
        results(backend, dtype, overwrite, device) for backend in (TritonKernels(), TORCH_BACKEND)
    )
    close = TOLERANCE.get(loss.dtype, 0.0)
    assert torch.allclose(loss, expected, rtol=close, atol=close)
    last_bit = torch.finfo(dtype).eps
    assert torch.allclose(gradient, reference, rtol=2 * last_bit, atol=last_bit * 1e-2)
    assert loss[0, 2] == 0 and not gradient[0, 2].any()
    assert gradient[0, 0, 4999] != 0 and not gradient[..., 5000:].any()


def test_a_rank_with_padding_alone_has_no_gradient(device: torch.device) -> None:
    logits = random_tensor((2, 6), torch.bfloat16, device, 1).detach()
    row = torch.ones(2, device=device)
    none = torch.full((2,), -1, device=device)
    gradient = TritonKernels().logits_gradient(logits, none, row, row, row, words=0, overwrite=False)
    assert gradient.shape == logits.shape and not gradient.any()


def test_a_maximum_is_exact_and_no_columns_give_none(device: torch.device) -> None:
    logits = random_tensor((3, 9001), torch.bfloat16, device, 1).detach()
    for given in (logits, logits[:, :1], logits[:, :0], logits[:0]):
        words = max(0, given.shape[1] - 3)
        ours, theirs = (each.row_maximum(given, words=words) for each in (TritonKernels(), TORCH_BACKEND))
        assert same_bits(ours, theirs)


def test_a_logit_that_is_not_a_number_shows_in_the_loss(device: torch.device) -> None:
    logits = torch.zeros((2, 6), device=device)
    logits[1, 3] = torch.nan
    targets = torch.zeros(2, dtype=torch.int64, device=device)
    losses = vocab_parallel_cross_entropy(logits, targets, group=ALONE, first=0, backend=TritonKernels())
    assert losses.isnan().tolist() == [False, True]


def test_a_second_backward_over_overwritten_logits_is_refused(device: torch.device) -> None:
    logits = random_tensor((2, 6), torch.float32, device, 1)
    targets = torch.zeros(2, dtype=torch.int64, device=device)
    loss = vocab_parallel_cross_entropy(
        logits * 1, targets, group=ALONE, first=0, overwrite=True, backend=TritonKernels()
    ).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_each_pass_is_one_operation() -> None:
    logits = torch.zeros((2, 3, 50), device="meta", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros((2, 3), dtype=torch.int64, device="meta")

    def both() -> None:
        vocab_parallel_cross_entropy(
            logits * 1, targets, group=ALONE, first=0, overwrite=True, backend=TritonKernels()
        ).sum().backward()

    names = [name for name in operations(both) if name.startswith("mpctl")]
    assert names == ["mpctl::row_maximum", "mpctl::own_sums", "mpctl::logits_gradient_"]
