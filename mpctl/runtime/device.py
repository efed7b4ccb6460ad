"""The device of a rank: which it is, how it computes, which cores are beside it, what it has held.

    training.dtype   parameters   products of float32 on a GPU
    fp32             float32      float32, 24 bits of mantissa
    tf32             float32      TF32: operands rounded to 11 bits, sums in float32 (NVIDIA's A100
                                  white paper); some seven times the rate on an H100

On a CPU both compute the same. ROCm's torch goes by the names of CUDA.

A host with several sockets has several NUMA nodes: cores with memory and PCIe links of their own.
A rank on the far side launches its kernels and copies its samples over the link between the
sockets. So its threads are bound to the cores of its GPU's node that the process may use; memory
that they write first, pinned buffers among it, then lies there too. `torchrun --numa-binding` does
the same and needs the program numactl, and a world that torchrun has started.

Linux describes nodes in sysfs (Documentation/ABI/stable/sysfs-devices-node): a PCI device's
`numa_node`, -1 where the firmware does not tell, and a node's `cpulist`. By hand, `0-3,8` are the
cores 0, 1, 2, 3 and 8; of them a process that may use 2 to 9 is bound to 2, 3 and 8.
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

from mpctl.errors import InputError
from mpctl.rundir.collective_log import parse_rank_ranges, rank_ranges
from mpctl.spec.job import JobSpec

LEAST_CAPABILITY = (8, 9)  # Ada; Hopper has 9.0

ROOT = Path("/")
NODES = "sys/devices/system/node"


def bind_to_node(address: str, root: Path = ROOT) -> str:
    """Bind all threads of this process to the cores beside the PCI device at `address`; what was
    done, in words, empty where there is nothing to choose. root: of the file system."""
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
    """The NUMA node of a PCI device; None where it is not told, or the host has a single node."""
    nodes = [path for path in (root / NODES).glob("node*") if path.name[4:].isdecimal()]
    try:
        text = (root / "sys/bus/pci/devices" / address / "numa_node").read_text("ascii")
    except OSError:
        return None
    return int(text) if len(nodes) > 1 and text.strip().isdecimal() else None


def node_cores(node: int, root: Path = ROOT) -> set[int] | None:
    """The cores of a NUMA node; None where it has none or does not tell."""
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
        with suppress(OSError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)


def prepare_device(job: JobSpec, local_rank: int) -> torch.device:
    """The device of process `local_rank` of this host, ready for the job: the current one, with the
    precision of float32 products that the job asks for and this process bound to the cores beside
    it, with a line in the log. On a CPU nothing is changed. To be called before threads start."""
    device = select_device(job.launch.device, local_rank)
    if device.type == "cuda":
        torch.set_float32_matmul_precision(matmul_precision(job))
        if job.launch.numa_binding == "node":
            done = bind_to_node(pci_address(torch.cuda.get_device_properties(device)))
            print(done or "NUMA: one node, or not told", flush=True)
    return device


def matmul_precision(job: JobSpec) -> str:
    """torch's word for the products of float32 operands: high is TF32."""
    return "high" if job.training.dtype == "tf32" else "highest"


def select_device(kind: str, local_rank: int) -> torch.device:
    """The device of process `local_rank` of this host, made the current one on CUDA."""
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def device_name(device: torch.device) -> str | None:
    """The GPU's name as its driver tells it, NVIDIA H100 80GB HBM3; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def pci_address(properties: object) -> str:
    """A GPU's place on the PCI bus, 0000:17:00.0, from what torch knows of it; empty where this
    torch does not tell."""
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    numbers = [getattr(properties, name, None) for name in names]
    if None in numbers:
        return ""
    domain, bus, device = numbers
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


@dataclass
class DeviceMemory:
    """The most memory that a rank has held: on a GPU as torch's allocator counts it, also where the
    allocator's own peak is set back between two calls (memory.py); on a CPU what the process
    held."""

    device: torch.device
    allocated: int = 0
    reserved: int = 0

    def peak(self) -> int:
        """Bytes of tensors; on a CPU of the whole process."""
        if self.device.type != "cuda":
            unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB on Linux
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        self.allocated = max(self.allocated, torch.cuda.max_memory_allocated(self.device))
        return self.allocated

    def peak_reserved(self) -> int | None:
        """Bytes that the allocator has taken from the device; None on a CPU."""
        if self.device.type != "cuda":
            return None
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self.device))
        return self.reserved


def require_fp8(job: JobSpec, device: torch.device) -> None:
    """Raises InputError where the job multiplies in fp8 and the GPU cannot."""
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
