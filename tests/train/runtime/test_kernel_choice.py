"""Ranks compute with the same kernels, or the run ends with the reason of the rank that cannot."""

from __future__ import annotations

import platform
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch

from mpctl.run.history.logs import is_warning
from mpctl.train.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.train.kernels.triton.backend import TritonKernels
from mpctl.train.runtime.kernel_choice import (
    FallbackKernels,
    KernelsDiffer,
    find_kernels,
    machine_kernels,
    require_same,
)
from mpctl.train.runtime.process import failure_record
from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective
from tests.ranks import grouped, run_each

CPU = torch.device("cpu")
NO_COMPILER = "RuntimeError: Failed to find C compiler"


class Named(KernelBackend):
    """Stands for Triton's kernels, with attention by a library of this name."""

    def __init__(self, attention: str) -> None:
        self.attention_library = attention

    def attention_name(self, *tensors: Any, **how: Any) -> str:
        return self.attention_library


def kernels_of(name: str) -> KernelBackend:
    return FallbackKernels(NO_COMPILER) if name == "none" else Named(name)


def compared(rank: int, size: int, names: list[str]) -> dict[str, Any]:
    """How a rank with the kernels of this name fares: its failure's words, whether it only reports
    another's, what it prints, and the messages that it took."""
    log, printed = list[Collective](), StringIO()
    try:
        with redirect_stdout(printed):
            require_same(kernels_of(names[rank]), grouped(rank, size, log, "world"), CPU)
    except KernelsDiffer as error:
        record = failure_record(error, rank=rank, coords={}, doing="")
        return {"error": record["error"], "is_echo": record["is_echo"], "messages": len(log)}
    return {"error": "", "printed": printed.getvalue(), "messages": len(log)}


def test_ranks_with_other_kernels_end_the_start() -> None:
    """One of three lacks Triton, or two; none differs; all lack it; one attends otherwise."""
    cases = {
        "lacks": ["cuDNN's kernel", "none", "cuDNN's kernel"],
        "most lack": ["none", "none", "cuDNN's kernel"],
        "attends": ["FlashAttention-3", "cuDNN's kernel", "FlashAttention-3"],
        "same": ["cuDNN's kernel"] * 3,
        "all lack": ["none"] * 3,
    }
    found = run_each({name: (compared, names) for name, names in cases.items()}, 3)
    host = platform.node()
    for name in ("same", "all lack"):
        assert found[name] == [{"error": "", "printed": "", "messages": 1}] * 3
    causes = {
        name: [rank for rank, one in enumerate(ranks) if not one.get("is_echo", True)] for name, ranks in found.items()
    }
    assert causes == {"lacks": [1], "most lack": [0, 1], "attends": [], "same": [], "all lack": []}
    lacking = f"host {host} has no Triton ({NO_COMPILER}), rank "
    assert found["lacks"][1]["error"].startswith(f"{lacking}0 has Named, attention by cuDNN's ")
    assert all(one["error"].startswith(f"{lacking}2 has Named, ") for one in found["most lack"][:2])
    assert found["lacks"][0]["error"] == "rank 1 without Triton, which rank 0 has"
    printed = [one["printed"] for one in found["attends"]]
    assert printed[0] == printed[2] == "" and is_warning(printed[1])
    assert printed[1].startswith(
        f"WARNING: on host {host} Named, attention by cuDNN's kernel; on most ranks Named, "
        "attention by FlashAttention-3: "
    )


def test_fused_kernels_are_those_of_a_cuda_device_that_runs_them(capfd: Any) -> None:
    assert machine_kernels(CPU, Group()) is TORCH_BACKEND
    kernels, line = find_kernels(torch.device("cuda")), capfd.readouterr().out
    if isinstance(kernels, FallbackKernels):
        assert line == f"WARNING: {kernels.warning}\n" and is_warning(line)
    else:
        assert isinstance(kernels, TritonKernels) and not line
