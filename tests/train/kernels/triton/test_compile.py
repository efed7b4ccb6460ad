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

from mpctl.train.kernels.triton.attention_tiles import KERNELS, ProgramLimits, tile
from tests.train.kernels.triton.compile_only import SHARED_BYTES, narrow_products

Kernels = list[dict[str, Any]]

ATTENTION = {f"{kernel.replace(' ', '_')}_kernel": kernel for kernel in KERNELS}
ATTENTION["attention_kernel"] = ATTENTION.pop("forward_kernel")
ROUNDED_TWICE = ("dropout_kernel", "dropout_backward_kernel", "rotate_kernel", "rows_kernel", "row_gradients_kernel")

LOSS_PASSES = {"row_maximum_kernel", "own_sums_kernel", "logits_gradient_kernel"}


def compiled(folder: Path, *arguments: str) -> Kernels:
    """What compile_only.py prints, compiled anew, in a process without Triton's interpreter."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    clean["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, "-m", "tests.train.kernels.triton.compile_only", *arguments]
    root = Path(__file__).parents[4]
    done = subprocess.run(command, capture_output=True, text=True, env=clean, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return compiled(tmp_path_factory.mktemp("triton"))


@pytest.mark.slow
def test_the_usual_attention_spills_nothing_and_makes_addresses_in_64_bits(tmp_path: Path) -> None:
    """bf16 heads of 128, 4 to a key-value head, with dropout, on compute capability 9.0: of the key
    gradient 752 bytes a thread were spilled. A row times a stride is beyond 32 bits where a tensor
    has 2^31 elements."""
    found = compiled(tmp_path, "90", "usual_attention")
    assert [each["kernel"] for each in found] == ["attention_kernel", "query_gradient_kernel", "key_gradient_kernel"]
    for kernel in found:
        assert kernel["spills"] == 0 and kernel["registers"] > 128, kernel
        assert kernel["narrow"] == []
        assert any(name.startswith("wgmma") for name in kernel["ptx"])


def test_attention_whose_dropout_has_a_number_is_compiled(tmp_path: Path) -> None:
    """As every run has it: the first visit of a GPU, with Triton 3.6, could not compile it."""
    found = compiled(tmp_path, "90", "numbered_attention")
    assert [each["kernel"] for each in found] == ["attention_kernel", "query_gradient_kernel", "key_gradient_kernel"]


def test_a_product_of_32_bits_with_a_stride_is_found() -> None:
    ptx = """
    ld.param.b32 %r1, [attention_kernel_param_1];
    ld.param.b32 %r2, [attention_kernel_param_2];
    mov.b32 %r3, %r1;
    mad.lo.s32 %r5, %r4, %r3, %r4;
    mul.wide.s32 %rd1, %r1, %r4;
    mul.lo.s32 %r6, %r2, %r4;
    """
    names = ["query", "strides", "sizes"]
    assert narrow_products(ptx, names) == ["strides (parameter 1)"]
    assert narrow_products(ptx.replace("mad.lo", "mad.wide"), names) == []


@pytest.mark.parametrize("capability", [75, 80, 86, 90, 100, 120, 0])
@pytest.mark.parametrize("kib", [32, 64, 99, 163, 227])
def test_tiles_fit_a_device_or_there_is_none(capability: int, kib: int) -> None:
    limits = ProgramLimits(kib * 1024, capability)
    for kernel in KERNELS:
        for head_size in (1, 16, 64, 65, 80, 96, 128, 129, 256):
            for element_bytes in (2, 4, 8):
                found = tile(kernel, head_size, element_bytes, limits)
                if found is None:
                    small = kib < 64 or (kib == 64 and head_size > 128)
                    assert small or capability == 75 or 90 <= capability < 120
                else:
                    assert found.kib <= kib
                    # what the first operands take at least: rows of queries or of keys
                    kept = found.keys if kernel == "key gradient" else found.queries
                    assert kept * head_size * min(element_bytes, 4) <= found.kib * 1024
    assert all(tile(each, 128, 2, ProgramLimits(232_448, 90)) is not None for each in KERNELS)


# attention alone is some 80 kernels: minutes on two cores that others use too
slow = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("capability", [pytest.param(each, marks=slow) for each in SHARED_BYTES])
def test_attention_fits_its_tiles_and_the_registers(capability: int, tmp_path: Path) -> None:
    """No spills for heads of 64 to 128 in 16 bits, of 64 in 32; products on tensor cores."""
    found = compiled(tmp_path, str(capability), "attentions")
    assert len(found) >= 80
    limits = ProgramLimits(SHARED_BYTES[capability], capability)
    wrong = []
    for kernel in found:
        dtype, d, _, what = kernel["case"].split()
        element_bytes = 4 if dtype == "float32" else 2
        pair_bytes = element_bytes + 1 if what == "whole" else 0
        chosen = tile(ATTENTION[kernel["kernel"]], int(d), element_bytes, limits, pair_bytes)
        assert chosen is not None
        spills = 0 if int(d) <= 128 else 64
        if what == "whole" or element_bytes == 4:
            spills = 1024
        elif capability == 100:
            spills = 8
        has_cores = any("mma" in name for name in kernel["ptx"])
        fits = kernel["spills"] <= spills and kernel["shared"] <= chosen.bytes_with(pair_bytes)
        if not fits or kernel["narrow"] or has_cores != (element_bytes == 2):
            shown = {name: value for name, value in kernel.items() if name != "ptx"}
            wrong.append(f"{shown} {chosen}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("capability", [pytest.param(each, marks=slow) for each in SHARED_BYTES])
def test_norms_sums_and_updates_spill_nothing(capability: int, tmp_path: Path) -> None:
    """Of rows to the widest, 8,192; what is read and written in 16 bits goes 16 bytes at a time."""
    found = compiled(tmp_path, str(capability), "sums", "updates")
    names = {kernel["kernel"] for kernel in found}
    assert names >= {
        "norm_kernel",
        "norm_backward_kernel",
        "activation_backward_kernel",
        "join_kernel",
        "dropout_sums_kernel",
        "column_sums_kernel",
        "adamw_kernel",
    }
    for kernel in found:
        shown = {name: value for name, value in kernel.items() if name != "ptx"}
        assert kernel["spills"] == 0 and not kernel["narrow"], shown
        if kernel["kernel"] in ("norm_kernel", "norm_backward_kernel"):
            assert any(name.startswith("ld.global.v") for name in kernel["ptx"]), shown


class TestAll:
    pytestmark = slow

    def test_each_kernel_compiles_and_fits_a_multiprocessor(self, kernels: Kernels) -> None:
        names = {kernel["kernel"] for kernel in kernels}
        assert {*ROUNDED_TWICE, *ATTENTION, "fp8_cast_kernel"} <= names
        assert all(kernel["shared"] <= SHARED_BYTES[90] for kernel in kernels)

    def test_strides_are_multiplied_in_64_bits(self, kernels: Kernels) -> None:
        assert not {each["kernel"]: each["narrow"] for each in kernels if each["narrow"]}

    def test_two_roundings_are_not_fused_and_loads_are_wide(self, kernels: Kernels) -> None:
        for kernel in kernels:
            counts = Counter(kernel["ptx"])
            if kernel["kernel"] in ROUNDED_TWICE:
                assert not any(name.startswith("fma") for name in counts), kernel["case"]
                wide = [name for name in counts if name.startswith("ld.global.v")]
                assert wide, kernel["case"]

    def test_casts_round_by_one_instruction_and_write_16_bytes_at_a_time(self, kernels: Kernels) -> None:
        for kernel in kernels:
            if kernel["kernel"] == "fp8_cast_kernel":
                names = kernel["ptx"]
                assert any(name.startswith("cvt.rn.satfinite.e") for name in names), kernel["case"]
                assert any(name.startswith("st.global.v") for name in names), kernel["case"]
                assert kernel["spills"] == 0

    def test_a_loss_reads_16_bytes_at_a_time(self, kernels: Kernels) -> None:
        """Of a number of words that is no multiple of 8, in columns that are; the target's logit
        alone is read by itself."""
        passes = [kernel for kernel in kernels if kernel["kernel"] in LOSS_PASSES]
        assert {kernel["kernel"] for kernel in passes} == LOSS_PASSES
        for kernel in passes:
            assert kernel["ptx"].get("ld.global.v4.b32", 0) >= 2
            assert kernel["ptx"].get("ld.global.b16", 0) <= 1
