"""A launch that is ready is met again by the same form of arguments alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.train.kernels.triton.attention import _Call, _prepare
from mpctl.train.kernels.triton.jit import elementwise
from mpctl.train.kernels.triton.launch import FORMS, KernelLaunch, Launcher, blocks, power_of_2


class Compiled:
    """What Triton returns of a launch: a kernel that is launched over a grid."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.log.append((grid, arguments))


class Kernel:
    arg_names = ("x", "y", "number", "size", "BLOCK")

    def __init__(self) -> None:
        self.first: list[Any] = []
        self.again: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def launch(*arguments: Any, **constants: Any) -> Compiled:
            self.first.append((grid, arguments, constants))
            return Compiled(self.again)

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(elementwise, "a_kernel", kernel, raising=False)
    return kernel


def byte_offset(offset: int) -> Tensor:
    """16 numbers that begin so many bytes after a multiple of 256."""
    space = torch.zeros(1024, dtype=torch.uint8)
    start = -space.data_ptr() % 256 + offset
    return space[start : start + 64].view(torch.float32)


def prepare(size: int) -> KernelLaunch:
    return KernelLaunch((3,), (size,), {"BLOCK": 16}, {"num_warps": 2})


def test_the_second_launch_of_a_form_is_ready(kernel: Kernel) -> None:
    launch = Launcher(lambda: elementwise, "a_kernel")
    x, y = byte_offset(0), byte_offset(0)
    launch((x, None), "fact", prepare, 5, varying=(7,))
    launch((y, None), "fact", lambda: pytest.fail("is ready"), varying=(8,))
    assert kernel.first == [((3,), (x, None, 7, 5), {"BLOCK": 16, "num_warps": 2})]
    ((grid, arguments),) = kernel.again
    assert grid == (3, 1, 1) and arguments[0] is y and arguments[1:] == (None, 8, 5, 16)


def test_what_triton_specialises_by_is_another_form(kernel: Kernel) -> None:
    """Types, sizes, strides, alignment, what is absent, facts."""
    launch = Launcher(lambda: elementwise, "a_kernel")
    x = byte_offset(0)
    forms: list[tuple[tuple[Tensor | None, ...], Any]] = [
        ((x, None), 1),
        ((x, None), 2),
        ((x, None), None),
        ((x, x), 1),
        ((x.int(), None), 1),
        ((byte_offset(4), None), 1),
        ((byte_offset(16), None), 1),
        ((x[:8], None), 1),
        ((x.view(4, 4), None), 1),
        ((x.view(4, 4).t(), None), 1),
        ((x[::2], None), 1),
    ]
    for tensors, fact in forms * 2:
        launch(tensors, fact, prepare, 5, varying=(7,))
    assert len(kernel.first) == len(kernel.again) == len(forms)


def test_forms_are_forgotten_before_they_are_too_many(kernel: Kernel) -> None:
    launch, x = Launcher(lambda: elementwise, "a_kernel"), byte_offset(0)
    for fact in range(FORMS + 1):
        launch((x, None), fact, prepare, 5, varying=(7,))
    launch((x, None), FORMS, prepare, 5, varying=(7,))
    launch((x, None), 0, prepare, 5, varying=(7,))
    assert len(kernel.first) == FORMS + 2 and len(kernel.again) == 1


def test_blocks_and_powers_by_hand() -> None:
    assert [blocks(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [power_of_2(n) for n in (1, 2, 3, 4, 5, 1025)] == [1, 2, 4, 4, 8, 2048]


def test_more_heads_than_the_second_axis_of_a_grid_has(device: torch.device) -> None:
    """65,535 is the most of a second axis; planes are numbered along the first."""
    x = torch.zeros(1, 1, 1, 16, device=device).expand(4096, 17, 1, 16)
    call = _Call.of(x, x, x, None, None, None, None, 0, None, [0, 0], True, 0, 0.0, 0.25)
    assert _prepare("forward", call, x).grid == (4096 * 17,)
    assert _prepare("key gradient", call, x, x, x).grid == (4096 * 17,)
    bias = torch.zeros(1, 1, 1, 1, device=device).expand(4096, 17, 1, 1)
    assert _prepare("bias gradient", call, x, bias).grid == (4096 * 17,)
