"""Cores, GPUs and free memory of this machine, found without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from mpctl.cores import usable_cores
from mpctl.launch.node.accelerators import amd_devices, count_visible, gpus_on_bus, nvidia_devices
from mpctl.launch.node.cgroup import memory_headroom

HOSTS = (
    "SLURM_STEP_NUM_NODES",
    "SLURM_NNODES",
    "SLURM_JOB_NUM_NODES",
    "PET_NNODES",
    "GROUP_WORLD_SIZE",
)
"""Environment variables with a number of hosts, the innermost first: of a Slurm step, of its job,
of torchrun's world."""


@dataclass(frozen=True, slots=True)
class Machine:
    """cores: that this process may use; gpus: that it may see; memory_bytes: free now, within the
    limit of the control group; hosts: allocated by the surrounding scheduler, 1 without one;
    idle_gpus: on the PCI bus where no driver offers any GPU to this process."""

    cores: int
    gpus: int
    memory_bytes: int
    hosts: int = 1
    idle_gpus: int = 0


def this_machine() -> Machine:
    """This machine as this process may use it: CPU affinity, CUDA_VISIBLE_DEVICES (of AMD's GPUs
    ROCR_ and HIP_VISIBLE_DEVICES too) and the memory limit are respected."""
    return Machine(
        cores=len(usable_cores()),
        gpus=_visible_gpus(),
        memory_bytes=_free_memory(),
        hosts=hosts_in(os.environ),
        idle_gpus=_idle_gpus(),
    )


def hosts_in(environment: Mapping[str, str]) -> int:
    """The number of hosts in a scheduler's variables; `1:4` (1 to 4 hosts) counts as 4."""
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
    """GPUs that this process may see: of NVIDIA, and where there are none, of AMD."""
    nvidia = count_visible(_nvidia_gpus(), "NVIDIA", os.environ)
    return nvidia or count_visible(len(amd_devices()), "AMD", os.environ)


def _idle_gpus() -> int:
    """GPUs of the bus, where no driver has files for any; 0 also where the user hides them."""
    return 0 if nvidia_devices() or amd_devices() else sum(gpus_on_bus().values())


def _nvidia_gpus() -> int:
    """NVIDIA GPUs as nvidia-smi lists them; by the driver's files where it is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return nvidia_devices()
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return nvidia_devices()
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
