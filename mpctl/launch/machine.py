"""What this machine offers, without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Machine:
    cores: int
    gpus: int
    memory_bytes: int


def this_machine() -> Machine:
    """Cores this process may use, GPUs it may see (CUDA_VISIBLE_DEVICES respected), memory."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return Machine(cores, _visible_gpus(), psutil.virtual_memory().total)


def _visible_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = _present_gpus()
    if visible is None:
        return present
    return min(
        present, len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    )


def _present_gpus() -> int:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
