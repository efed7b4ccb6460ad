"""How attention's kernels are launched: the sizes of their blocks, warps and stages of loading.

Of causal attention with dropout, blocks fit the 99 KiB of shared memory that a program has on
compute capability 8.6 and 8.9; the products of 16 bits run on tensor cores of 9.0
(tests/kernels/triton/test_compile.py), and ptxas spills at most 40 bytes a thread there. Which
sizes are the fastest was never measured on a device.

By hand, forward, 16 bits, heads of 128: 128 queries take 32 KiB, two stages of 64 keys and values
64 KiB.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Tile(NamedTuple):
    """Rows and keys of a block, warps of a program, and how many blocks are loaded ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


# by kernel, then by the largest head size that it is for: of 2 bytes an element
NARROW = {
    "forward": {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 4, 2)},
    "query gradient": {64: Tile(128, 64, 8, 2), 128: Tile(64, 64, 4, 2), 256: Tile(32, 32, 8, 1)},
    "key gradient": {64: Tile(64, 128, 8, 2), 128: Tile(64, 64, 4, 2), 256: Tile(32, 32, 8, 1)},
    "bias gradient": {64: Tile(64, 64, 8, 1), 128: Tile(32, 64, 4, 1), 256: Tile(32, 32, 4, 1)},
}
# of 4 bytes and more, whose products take no tensor cores
WIDE = {64: Tile(32, 32, 4, 1), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 4, 1)}


def tile(kernel: str, head_size: int, element_bytes: int) -> Tile:
    """The tile of one of the four kernels for heads of up to 256."""
    sizes = NARROW[kernel] if element_bytes <= 2 else WIDE
    return next(sizes[most] for most in sizes if head_size <= most)


def constants(kernel: str, head_size: int, element_bytes: int) -> dict[str, Any]:
    """A kernel's block sizes and the compiler's options, by keyword."""
    chosen = tile(kernel, head_size, element_bytes)
    return {
        "D": head_size,
        "BLOCK_D": max(16, 1 << (head_size - 1).bit_length()),
        "BLOCK_Q": chosen.queries,
        "BLOCK_K": chosen.keys,
        "num_warps": chosen.warps,
        "num_stages": chosen.stages,
    }
