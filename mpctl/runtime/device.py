"""The device of a rank: which it is, how it computes, which cores are beside it, what it has held.

    training.dtype   parameters   products of float32 on a GPU
    fp32             float32      float32, 24 bits of mantissa
    tf32             float32      TF32: operands rounded to 11 bits, sums in float32 (NVIDIA's A100
                                  white paper); some seven times the rate on an H100

On a CPU both compute the same. ROCm's torch goes by the names of CUDA.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch

from mpctl.runtime.numa import bind_to_node
from mpctl.spec.job import JobSpec


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
    allocator's own peak is set back between two calls (memory_watch.py); on a CPU what the process
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
