"""What nvidia-smi prints, in the forms that NVIDIA documents, as devices and links."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpctl.doctor.gpus import parse_gpus, parse_links, probe_gpus

LISTING = """\
0, GPU-aaaa, NVIDIA H100 80GB HBM3, 81559, 4, 570.86.15, Disabled, 0
1, GPU-bbbb, NVIDIA H100 80GB HBM3, 81559, 61023, 570.86.15, Enabled, 2
2, GPU-cccc, NVIDIA T400, 2048, 1, 570.86.15, [N/A], [N/A]
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-51,104-155\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tNODE\t0-51,104-155\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t52-103\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


def test_a_listing_of_gpus() -> None:
    gpus = parse_gpus(LISTING, "GPU-bbbb\nGPU-bbbb\n")
    assert [gpu.index for gpu in gpus] == [0, 1, 2]
    assert gpus[0].memory_total == 81559 << 20
    assert [gpu.processes for gpu in gpus] == [0, 2, 0]
    assert [gpu.uncorrected_errors for gpu in gpus] == [0, 2, None]
    assert [gpu.mig for gpu in gpus] == [False, True, False]
    assert gpus[2].name == "NVIDIA T400"


def test_what_is_no_listing_has_no_gpus() -> None:
    assert parse_gpus("No devices were found\n", "") == []


def test_the_matrix_of_links() -> None:
    links = [["X", "NV18", "SYS"], ["NV18", "X", "SYS"], ["SYS", "SYS", "X"]]
    assert parse_links(TOPOLOGY, 3) == links


@pytest.mark.parametrize("text", ["", "No devices were found", TOPOLOGY[:90]])
def test_a_matrix_that_is_not_whole_is_none(text: str) -> None:
    assert parse_links(text, 3) == []


def test_a_tool_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML' >&2\nexit 18\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    gpus = probe_gpus()
    assert (gpus.tool, gpus.error, gpus.devices) == ("nvidia-smi", "Failed to initialize NVML", [])
