"""Names and copies of kernels that are to be timed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpctl.bench.kernel_list import (
    CACHE_BYTES,
    MOST_COPIES,
    PlannedKernel,
    case_copies,
    case_sizes,
)


def test_a_name_has_the_sizes_and_no_flags() -> None:
    kernel = PlannedKernel(
        "layers.attention",
        {"kernel": "attention", "part": "forward", "dtype": "bf16", "copies": 1,
         "shape": {"batch": 2, "heads": 4, "causal": 1, "window": 8}},
        flops=1.0, bytes=1.0, predicted_seconds=None,
    )  # fmt: skip
    assert kernel.name == "attention layers.attention forward 2x4 bf16" and not kernel.is_layer
    assert case_sizes({"bias": 1, "rows": 3}) == "3"


@given(st.floats(min_value=1, max_value=1e15))
def test_copies_fill_a_cache_unless_they_are_the_most(moved: float) -> None:
    copies = case_copies(moved)
    assert 1 <= copies <= MOST_COPIES
    assert copies * moved >= CACHE_BYTES or copies == MOST_COPIES
    assert copies == 1 or (copies - 1) * moved < CACHE_BYTES
