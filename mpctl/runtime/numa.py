"""Binding a rank to the processor cores beside its GPU.

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
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mpctl.rundir.collective_log import parse_rank_ranges, rank_ranges

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
