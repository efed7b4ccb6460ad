"""Memory of the host for copies from a device and back, at its true size.

For CUDA it is pages of the process that no other memory shares, pinned by cudaHostRegister. torch's
allocator of pinned memory (CachingHostAllocator) rounds each request up to a power of two, 4.3 GB
for a word table of 2.2, and gives a block out again when it is asked for one and finds that the
device has passed its copies.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpctl.core.errors import RunFailed
from mpctl.core.units import bytes_text

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context of the process."""


def host_block(size: int, device: torch.device, use: str) -> Tensor:
    """So many bytes of host memory, uint8 [size], pinned for a device that is not the host. It must
    not be freed while the device copies. use: of it and a way without it, for the error. Raises
    RunFailed if it cannot be pinned."""
    if device.type == "cuda":
        return pinned_block(size, use, torch.cuda.cudart())
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")


def pinned_block(size: int, use: str, runtime: Any) -> Tensor:
    """The same of pinned pages. runtime: CUDA's."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin
    pages = np.frombuffer(memory, dtype=np.uint8)
    pointer = pages.ctypes.data
    if error := int(runtime.cudaHostRegister(pointer, size, PORTABLE)):
        raise RunFailed(f"{bytes_text(size)} of host memory cannot be pinned (cudaHostRegister: error {error}) {use}")
    unpin = weakref.finalize(pages, runtime.cudaHostUnregister, pointer)  # before it is unmapped
    unpin.atexit = False
    return torch.from_numpy(pages)
