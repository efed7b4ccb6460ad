"""Every kernel is compiled for a GPU, as it would be launched there, on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.triton.compile_only import SHARED_BYTES

ATTENTION = ("attention_kernel", "query_gradient", "key_gradient", "bias_gradient")
ROUNDED_TWICE = (
    "dropout_kernel", "dropout_backward_kernel", "rotate_kernel", "rows_kernel",
    "row_gradients_kernel",
)  # fmt: skip

LOSS_PASSES = {"row_maximum_kernel", "own_sums_kernel", "logits_gradient_kernel"}

# attention alone is some 70 kernels: minutes on two cores that others use too
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What compile_only.py prints, compiled anew, in a process without Triton's interpreter."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    clean["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.kernels.triton.compile_only"]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, env=clean, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_kernel_compiles_and_fits_a_multiprocessor(kernels: list[dict[str, Any]]) -> None:
    names = {kernel["kernel"] for kernel in kernels}
    assert {*ROUNDED_TWICE, "attention_kernel"} <= names
    assert {f"{part}_gradient_kernel" for part in ("query", "key", "bias")} <= names
    assert "fp8_cast_kernel" in names
    assert all(kernel["shared"] <= SHARED_BYTES for kernel in kernels)


def test_two_roundings_are_not_fused_and_loads_are_wide(
    kernels: list[dict[str, Any]],
) -> None:
    for kernel in kernels:
        counts = Counter(kernel["ptx"])
        if kernel["kernel"] in ROUNDED_TWICE:
            assert not any(name.startswith("fma") for name in counts), kernel["key"]
            wide = [name for name in counts if name.startswith("ld.global.v")]
            assert wide, kernel["key"]


def test_a_loss_reads_16_bytes_at_a_time(kernels: list[dict[str, Any]]) -> None:
    """Of a number of words that is no multiple of 8, in columns that are; the target's logit alone
    is read by itself."""
    passes = [k for k in kernels if k["kernel"] in LOSS_PASSES]
    assert {kernel["kernel"] for kernel in passes} == LOSS_PASSES
    for kernel in passes:
        assert kernel["ptx"].get("ld.global.v4.b32", 0) >= 2
        assert kernel["ptx"].get("ld.global.b16", 0) <= 1


def test_casts_round_by_one_instruction_and_write_16_bytes_at_a_time(
    kernels: list[dict[str, Any]],
) -> None:
    for kernel in kernels:
        if kernel["kernel"] == "fp8_cast_kernel":
            names = kernel["ptx"]
            assert any(name.startswith("cvt.rn.satfinite.e") for name in names), kernel["key"]
            assert any(name.startswith("st.global.v") for name in names), kernel["key"]
            assert not any(name.startswith(("ld.local", "st.local")) for name in names)


def test_attention_multiplies_on_tensor_cores_and_spills_nothing(
    kernels: list[dict[str, Any]],
) -> None:
    """In 16 bits; 32 bits are exact, without tensor cores."""
    of_attention = [each for each in kernels if each["kernel"].startswith(ATTENTION)]
    assert len(of_attention) >= 7 * 4  # of a size: two variants of three kernels, and the bias's
    for kernel in of_attention:
        has_cores = any("mma" in name for name in kernel["ptx"])
        is_narrow = "*bf16" in kernel["key"] or "*fp16" in kernel["key"]
        assert has_cores == is_narrow, kernel["key"]
        assert not any(name.startswith(("ld.local", "st.local")) for name in kernel["ptx"])
