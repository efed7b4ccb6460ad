"""The device of a rank: its selection, precision, nearest CPU cores and peak memory.

    training.dtype   parameters   products of float32 on a GPU
    fp32             float32      float32, 24 bits of mantissa
    tf32             float32      TF32: operands rounded to 11 bits, sums in float32 (NVIDIA's A100
                                  white paper); some seven times the rate on an H100

On a CPU both compute the same. ROCm builds of torch use the names of CUDA.

A host with several sockets has several NUMA nodes, each with its own memory and PCIe links. A rank
on another node than its GPU launches kernels and copies samples over the link between the sockets.
So its threads are bound to those cores of its GPU's node that the process may use; memory that they
touch first, such as pinned buffers, is then allocated there too. `torchrun --numa-binding` does the
same, but needs the program numactl and ranks that torchrun started.

Linux describes nodes in sysfs (Documentation/ABI/stable/sysfs-devices-node): a PCI device's
`numa_node`, -1 if the firmware does not report it, and a node's `cpulist`. Example: `0-3,8` are the
cores 0, 1, 2, 3 and 8; a process that may use cores 2 to 9 is bound to 2, 3 and 8.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from mpctl.core.errors import InputError
from mpctl.records.rundir.collective_log import parse_rank_ranges, rank_ranges
from mpctl.spec.job import JobSpec

LEAST_CAPABILITY = (8, 9)  # Ada; Hopper has 9.0

ROOT = Path("/")
NODES = "sys/devices/system/node"


def bind_to_node(address: str, root: Path = ROOT) -> str:
    """Bind all threads of this process to the cores nearest to the PCI device at `address`; returns
    what was done as text, empty if there is nothing to choose. root: of the file system."""
    node = gpu_node(address, root)
    cores = node_cores(node, root) if node is not None else None
    if cores is None or not hasattr(os, "sched_setaffinity"):
        return ""
    usable = os.sched_getaffinity(0)
    own = cores & usable
    if not own:
        return f"not bound to NUMA node {node} of GPU {address}, of whose cores none may be used"
    if own != usable:
        _bind_threads(own)
    return f"bound to the cores {cores_text(own)} of NUMA node {node}, beside GPU {address}"


def gpu_node(address: str, root: Path = ROOT) -> int | None:
    """The NUMA node of a PCI device; None if it is not reported or the host has a single node."""
    nodes = [path for path in (root / NODES).glob("node*") if path.name[4:].isdecimal()]
    try:
        text = (root / "sys/bus/pci/devices" / address / "numa_node").read_text("ascii")
    except OSError:
        return None
    return int(text) if len(nodes) > 1 and text.strip().isdecimal() else None


def node_cores(node: int, root: Path = ROOT) -> set[int] | None:
    """The cores of a NUMA node; None if it has none or reports none."""
    try:
        text = (root / NODES / f"node{node}" / "cpulist").read_text("ascii").strip()
        return set(parse_rank_ranges(text)) or None
    except (OSError, ValueError):
        return None


def cores_text(cores: Iterable[int]) -> str:
    """`0-3,8`, as sysfs writes them."""
    return rank_ranges(sorted(cores))


def _bind_threads(cores: set[int]) -> None:
    """Bind this process's threads; later ones inherit the cores of the thread that starts them."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)


def prepare_device(job: JobSpec, local_rank: int) -> torch.device:
    """The device of process `local_rank` of this host, ready for the job: the current one, with the
    precision of float32 products that the job asks for. Binds this process to the cores nearest to
    it and prints a line about that. Does nothing on a CPU. Call it before starting threads."""
    device = select_device(job.launch.device, local_rank)
    if device.type == "cuda":
        torch.set_float32_matmul_precision(matmul_precision(job))
        if job.launch.numa_binding == "node":
            done = bind_to_node(pci_address(torch.cuda.get_device_properties(device)))
            print(done or "NUMA: one node, or not told", flush=True)
    return device


def matmul_precision(job: JobSpec) -> str:
    """torch's name for the precision of float32 products: high is TF32."""
    return "high" if job.training.dtype == "tf32" else "highest"


def select_device(kind: str, local_rank: int) -> torch.device:
    """The device of process `local_rank` of this host, made the current one on CUDA."""
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def device_name(device: torch.device) -> str | None:
    """The GPU's name as its driver reports it, such as NVIDIA H100 80GB HBM3; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def pci_address(properties: object) -> str:
    """A GPU's PCI address, such as 0000:17:00.0, from torch's device properties; empty if this
    version of torch does not report it."""
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    numbers = [getattr(properties, name, None) for name in names]
    if None in numbers:
        return ""
    domain, bus, device = numbers
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


@dataclass
class DeviceMemory:
    """The peak memory of a rank: on a GPU as torch's allocator counts it, even if the allocator's
    peak statistic is reset between two calls (memory.py); on a CPU the peak of the process."""

    device: torch.device
    allocated: int = 0
    reserved: int = 0

    def peak(self) -> int:
        """Peak bytes of tensors; on a CPU, of the process."""
        if self.device.type != "cuda":
            unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB on Linux
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        self.allocated = max(self.allocated, torch.cuda.max_memory_allocated(self.device))
        return self.allocated

    def peak_reserved(self) -> int | None:
        """Peak bytes that the allocator has reserved on the device; None on a CPU."""
        if self.device.type != "cuda":
            return None
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self.device))
        return self.reserved


def require_fp8(job: JobSpec, device: torch.device) -> None:
    """Raises InputError if the job multiplies in fp8 and the GPU cannot."""
    if job.training.dtype == "fp8" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        check_capability(name, capability, is_amd=torch.version.hip is not None)


def check_capability(name: str, capability: tuple[int, int], *, is_amd: bool = False) -> None:
    """Raises InputError unless a GPU of this name and compute capability multiplies in fp8."""
    if is_amd or capability < LEAST_CAPABILITY:
        least, has = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, capability))
        message = f"fp8 needs an NVIDIA GPU of compute capability {least} or more, {name} has {has}"
        raise InputError.of("fp8-device", "training.dtype", message, "use --dtype bf16")
