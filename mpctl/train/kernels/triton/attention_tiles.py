"""Blocks of the attention kernels, by head size, type and device.

A tile is chosen so that a thread's numbers fit its 255 registers: what does not fit is spilled to
local memory in every turn of the loop. With heads of 64 to 128 no tile spills a byte on compute
capability 8.0, 9.0, 10.0 or 12.0, with shared key-value heads or dropout or without
(tests/train/kernels/triton/test_registers.py reads it from the assembler). What decides is where a device
has the operands of its products: in registers (mma.sync), in shared memory (wgmma, 9.0), or with
the sums in a memory of their own (tcgen05, 10.0 and 11.0), and how much shared memory a program may
have: 64 KiB on AMD's CDNA 3, 99 KiB on 8.6, 8.9 and 12.0, 163 KiB on 8.0, 227 KiB on 9.0 and 10.0.

By hand: the key gradient of heads of 128 holds the sums dK and dV, 4 bytes a key and column. With
64 keys and 4 warps that is 2 x 64 x 128 / 128 threads = 128 registers, with 64 rows' scores and
their gradients 64 more, and with addresses and hashes it spilled 752 bytes. With 128 keys, 32 rows
and 8 warps it is 128 + 32.

Which of the tiles that do not spill is the fastest was not measured.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Kernel = Literal["forward", "query gradient", "key gradient", "bias gradient"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)


class ProgramLimits(NamedTuple):
    """Limits of a device for a program: bytes of shared memory, and NVIDIA's compute capability as
    major times 10 plus minor, 0 for another maker's."""

    shared: int
    capability: int


HOPPER = ProgramLimits(232_448, 90)


class Tile(NamedTuple):
    """Rows and keys of a block, warps of a program, blocks loaded ahead, and KiB of shared memory
    at most."""

    queries: int
    keys: int
    warps: int
    stages: int
    kib: int

    def bytes_with(self, pair_bytes: int) -> int:
        """The most bytes of shared memory that the kernel takes. pair_bytes: of the blocks of a
        mask or a bias that are loaded ahead, for each pair of query and key."""
        return self.kib * 1024 + self.stages * self.queries * self.keys * pair_bytes


Tiles = dict[Kernel, dict[int, tuple[Tile, ...]]]

# of 2 bytes an element, by kernel and the largest head size, the preferred first
NARROW: Tiles = {
    "forward": {
        64: (Tile(128, 64, 8, 2, 49),),
        128: (Tile(128, 32, 8, 2, 64),),
        256: (Tile(64, 32, 8, 2, 97), Tile(32, 32, 4, 1, 48)),
    },
    "query gradient": {
        64: (Tile(128, 64, 8, 2, 64), Tile(64, 64, 8, 2, 49)),
        128: (Tile(64, 64, 8, 2, 97), Tile(64, 32, 4, 1, 49)),
        256: (Tile(32, 32, 8, 1, 64),),
    },
    "key gradient": {
        64: (Tile(32, 128, 8, 2, 57),),
        128: (Tile(32, 64, 8, 2, 65), Tile(32, 64, 8, 1, 56)),
        256: (Tile(32, 32, 8, 1, 80), Tile(16, 32, 8, 1, 57)),
    },
    "bias gradient": {64: (Tile(64, 64, 8, 1, 48),), 128: (Tile(32, 64, 4, 1, 64),), 256: (Tile(32, 32, 4, 1, 64),)},
}
# where products read their operands from shared memory: 9.0 to 11.0
FROM_SHARED: Tiles = {
    "forward": {64: (Tile(128, 64, 8, 3, 65),), 128: (Tile(128, 64, 8, 2, 97),), 256: (Tile(64, 32, 4, 2, 97),)},
    "query gradient": {64: (Tile(128, 64, 8, 2, 73),), 128: (Tile(64, 64, 4, 2, 113),), 256: (Tile(32, 32, 8, 1, 64),)},
    "key gradient": {64: (Tile(64, 128, 8, 2, 82),), 128: (Tile(32, 128, 8, 2, 113),), 256: (Tile(32, 32, 8, 1, 80),)},
    "bias gradient": NARROW["bias gradient"],
}
# of 4 bytes and more, whose products take no tensor cores
WIDE = {64: (Tile(32, 32, 8, 1, 48),), 128: (Tile(16, 16, 8, 1, 48),), 256: (Tile(16, 16, 8, 1, 66),)}


def tile(kernel: Kernel, head_size: int, element_bytes: int, device: ProgramLimits, pair_bytes: int = 0) -> Tile | None:
    """The tile of a kernel for heads of up to 256; None where none fits the device, or where
    Triton has no tensor cores to use (before 8.0). pair_bytes: of a mask and a bias, whose blocks
    are loaded ahead too."""
    if 0 < device.capability < 80:
        return None
    family = FROM_SHARED if 90 <= device.capability < 120 else NARROW
    sizes = family[kernel] if element_bytes <= 2 else WIDE
    tiles = next(sizes[most] for most in sizes if head_size <= most)
    return next((each for each in tiles if each.bytes_with(pair_bytes) <= device.shared), None)


def current_limits() -> ProgramLimits:
    """Return the limits of the device that Triton would launch on; an H100's for its interpreter."""
    from triton.runtime import driver

    from mpctl.train.kernels.triton.jit.bits import IS_INTERPRETED

    if IS_INTERPRETED.value:
        return HOPPER
    target, device = driver.active.get_current_target(), driver.active.get_current_device()
    shared = driver.active.utils.get_device_properties(device)["max_shared_mem"]
    return ProgramLimits(shared, int(target.arch) if target.backend == "cuda" else 0)
