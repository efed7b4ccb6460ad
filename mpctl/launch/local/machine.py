"""What this machine offers, without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from mpctl.launch.local.cgroup import memory_headroom

# Schedulers' numbers of hosts, the closest first: of a Slurm step, of its job, of torchrun's world.
HOSTS = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "PET_NNODES",
         "GROUP_WORLD_SIZE")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """memory_bytes: what may be taken now, within the control group's limit; hosts: those that the
    surrounding scheduler has given this job, 1 without a scheduler."""

    cores: int
    gpus: int
    memory_bytes: int
    hosts: int = 1


def this_machine() -> Machine:
    """Cores this process may use, GPUs it may see (CUDA_VISIBLE_DEVICES respected), free memory."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return Machine(cores, _visible_gpus(), _free_memory(), hosts_in(os.environ))


def hosts_in(environment: Mapping[str, str]) -> int:
    """How many hosts a scheduler's variables speak of; `1:4` hosts may become 4."""
    for name in HOSTS:
        last = environment.get(name, "").rpartition(":")[2]
        if last.isdecimal():
            return max(1, int(last))
    return 1


def _free_memory() -> int:
    try:
        available = int(psutil.virtual_memory().available)
    except (psutil.Error, OSError):  # /proc is hidden
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    headroom = memory_headroom()
    return available if headroom is None else min(available, headroom)


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
