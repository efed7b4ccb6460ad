"""Probe of the GPUs of this host and the links between them, as nvidia-smi describes them; without
it, and for AMD's, by the files of their drivers (hosts/machine.py).

Read are `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` (sizes in MiB),
`--query-compute-apps=gpu_uuid` and the matrix of `nvidia-smi topo -m`, whose words are NVIDIA's:
NV18 (18 NVLinks), PIX, PXB (PCIe bridges), PHB (a host bridge), NODE (a NUMA node), SYS (between
them).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from mpctl.doctor.documents import Gpu, Gpus
from mpctl.hosts.machine import (
    ROOT,
    AmdGpu,
    amd_devices,
    amd_driver,
    gpus_on_bus,
    nvidia_devices,
)

FIELDS = (
    "index", "uuid", "name", "memory.total", "memory.used", "driver_version", "mig.mode.current",
    "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
TOOL_SECONDS = 15.0
MIB = 1 << 20


def probe_gpus(root: Path = ROOT) -> Gpus:
    """GPUs by nvidia-smi; their number by the device files where it is missing; else those of AMD.
    root: of the file system."""
    tool = shutil.which("nvidia-smi")
    return _by_files(root) if tool is None else _by_nvidia_smi(tool, root)


def _by_files(root: Path) -> Gpus:
    files, amd, driver = nvidia_devices(root), amd_devices(root), amd_driver(root)
    devices = [] if files else [_amd_gpu(n, gpu, driver) for n, gpu in enumerate(amd)]
    return Gpus(
        tool="device files" if files else "amdgpu" if amd else "none",
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        devices=devices,
        device_files=files or len(amd),
        on_bus=sum(gpus_on_bus(root).values()),
        links=[],
        error=None,
    )


def _amd_gpu(index: int, gpu: AmdGpu, driver: str) -> Gpu:
    return Gpu(
        index=index, name=f"AMD {gpu.name}", memory_total=gpu.memory_total,
        memory_used=gpu.memory_used, driver=driver or "amdgpu", mig=False, uncorrected_errors=None,
        processes=0,
    )  # fmt: skip


def _by_nvidia_smi(tool: str, root: Path) -> Gpus:
    query = _run(tool, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
    apps = _run(tool, "--query-compute-apps=gpu_uuid", "--format=csv,noheader")
    topology = _run(tool, "topo", "-m")
    devices = [] if query.returncode else parse_gpus(query.stdout, apps.stdout)
    return Gpus(
        tool="nvidia-smi",
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        devices=devices,
        device_files=nvidia_devices(root),
        on_bus=sum(gpus_on_bus(root).values()),
        links=parse_links(topology.stdout, len(devices)),
        error=_complaint(query) if query.returncode else None,
    )


def parse_gpus(listing: str, applications: str) -> list[Gpu]:
    """The GPUs of a listing with FIELDS as columns; applications: a line with the GPU's uuid for
    each process that computes. Lines of another form are left out."""
    users = [line.strip() for line in applications.splitlines()]
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines()]
    return [_gpu(row, users) for row in rows if len(row) == len(FIELDS) and row[0].isdecimal()]


def _gpu(row: list[str], users: list[str]) -> Gpu:
    index, uuid, name, total, used, driver, mig, errors = row
    return Gpu(
        index=int(index),
        name=name,
        memory_total=(_whole(total) or 0) * MIB,
        memory_used=(_whole(used) or 0) * MIB,
        driver=driver,
        mig=mig == "Enabled",
        uncorrected_errors=_whole(errors),
        processes=users.count(uuid),
    )


def parse_links(matrix: str, count: int) -> list[list[str]]:
    """The rows GPU0, GPU1, ... of `nvidia-smi topo -m`, `count` columns each; [] without them."""
    plain = re.sub("\x1b\\[[0-9;]*m", "", matrix)  # the header is underlined
    rows = [line.split() for line in plain.splitlines()]
    cells = [row[1 : count + 1] for row in rows if row and re.fullmatch(r"GPU\d+", row[0])]
    links = [row for row in cells if row and not row[0].startswith("GPU")]
    return links if len(links) == count and all(len(row) == count for row in links) else []


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a tool; one that does not end in time gives an exit code of its own."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=TOOL_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _complaint(done: subprocess.CompletedProcess[str]) -> str:
    words = (done.stderr or done.stdout).strip().splitlines()
    return words[0] if words else f"exit code {done.returncode}"
