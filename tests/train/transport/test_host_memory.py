"""Host memory for copies from a device and back: its size, and when it is pinned."""

from __future__ import annotations

import pytest
import torch

from mpctl.core.errors import RunFailed
from mpctl.train.transport.host_memory import host_block, pinned_block


def test_of_a_cpu_it_is_ordinary_memory() -> None:
    block = host_block(5, torch.device("cpu"), "")
    assert block.dtype == torch.uint8 and block.shape == (5,) and not block.is_pinned()


class FakeCuda:
    """CUDA's runtime, which pins nothing. error: what pinning returns."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.pinned = error, dict[int, int]()

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        self.pinned[pointer] = size
        return self.error

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.pinned[pointer]
        return 0


def test_a_block_is_pinned_at_its_true_size_and_until_its_last_part_is_gone() -> None:
    cuda = FakeCuda()
    block = pinned_block(5 << 20, "for a test", cuda)
    assert cuda.pinned == {block.data_ptr(): 5 << 20} and block.data_ptr() % 4096 == 0
    part = block[:8].view(torch.float32)
    del block
    part.fill_(1)
    assert len(cuda.pinned) == 1 and part.tolist() == [1, 1]
    del part
    assert cuda.pinned == {}
    with pytest.raises(RunFailed, match=r"^5\.0 MiB of host .* error 2\) for a test; use"):
        pinned_block(5 << 20, "for a test; use less", FakeCuda(error=2))
