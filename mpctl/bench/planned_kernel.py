"""A kernel that is to be timed: its work, its name, and what the plan expects of it.

`flops` are those that a kernel computes, `bytes` the least that must be read and written, each
tensor once. In training other tensors pass through the caches before a kernel runs again, so that
it is timed with several copies of its operands in turn, 32 MiB of them (at most 8).

By hand, X [512, 256] W [256, 1024] in fp32: 2 x 512 x 256 x 1024 = 268 MFLOP, and 4 (512 x 256 +
256 x 1024 + 512 x 1024) = 3.67 MB, 73 FLOP a byte; 9.1 times that are 32 MiB, so 8 copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from mpctl.rundir.kernel_files import KernelCase

CACHE_BYTES, MOST_COPIES = 2**25, 8  # more than a core's own cache holds
FLAGS = ("causal", "window", "bias", "sample_mask")  # of a shape, no part of a name


@dataclass(frozen=True)
class PlannedKernel:
    """A kernel before it is timed. site: where the model has it, such as `layers.mlp.up`. flops,
    bytes: computed, and read or written at least. predicted_seconds: None where the cluster does
    not describe the device. is_compute: whether its share of the peak is of FLOP/s, else of the
    memory's bytes/s."""

    site: str
    case: KernelCase
    flops: float
    bytes: float
    predicted_seconds: float | None
    is_compute: bool = False

    @property
    def is_layer(self) -> bool:
        """Whether it is a whole layer."""
        return self.case["kernel"] == "layer"

    @property
    def name(self) -> str:
        """`matmul layers.mlp.up forward 512x256x1024 fp32`, the same in every run."""
        case = self.case
        sizes = case_sizes(case["shape"])
        return f"{case['kernel']} {self.site} {case['part']} {sizes} {case['dtype']}"


def case_copies(moved: float) -> int:
    """Copies of operands of so many bytes that are used in turn.

    >>> case_copies(3.67e6), case_copies(2**24), case_copies(2**30)
    (8, 2, 1)
    """
    return min(MOST_COPIES, max(1, ceil(CACHE_BYTES / moved)))


def case_sizes(shape: Mapping[str, int]) -> str:
    """The sizes of a case as a name has them, without what only says yes or no.

    >>> case_sizes({"batch": 8, "queries": 64, "causal": 1})
    '8x64'
    """
    return "x".join(str(size) for name, size in shape.items() if name not in FLAGS)
