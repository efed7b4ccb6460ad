"""GPUs of this host, found by the files of their drivers, without torch and without nvidia-smi.

A container has the device files of its GPUs and often no nvidia-smi; the driver's folder in /proc,
the bus and the kernel's topology show all GPUs of the host, whoever may use them. So the device
files count first.

    NVIDIA  /dev/nvidia0, /dev/nvidia1, ...; where the driver has made none yet (it does at the
            first use), the folders of /proc/driver/nvidia/gpus
    AMD     nodes of /sys/class/kfd/kfd/topology with a simd_count, of which this process has the
            file /dev/dri/renderDN and /dev/kfd (the driver amdgpu, which ROCm uses)
    bus     PCI devices of these vendors, also without a driver: a reason why none can be used

torch's ROCm builds answer to the names of CUDA, RCCL to that of NCCL, and so mpctl runs both as
`cuda`. By hand, an 8-GPU host of which a container has /dev/nvidia2 and /dev/nvidia5 shows 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Vendor = Literal["NVIDIA", "AMD"]
VENDORS: Mapping[str, Vendor] = {"0x10de": "NVIDIA", "0x1002": "AMD"}
BUS_CLASSES = {"NVIDIA": ("0x0300", "0x0302"), "AMD": ("0x0380", "0x1200")}
"""PCI classes of GPUs that compute: VGA and 3D controllers; of AMD, whose VGA controllers are often
part of a processor, display controllers and processing accelerators alone."""
VISIBLE = {
    "NVIDIA": ("CUDA_VISIBLE_DEVICES",),
    "AMD": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
"""Variables that hide GPUs; each of AMD's hides from those that the one before has left."""
KFD_NODES = "sys/class/kfd/kfd/topology/nodes"
ROOT = Path("/")


@dataclass(frozen=True)
class AmdGpu:
    """An AMD GPU. name: its instruction set, gfx942; address: on the PCI bus, 0000:05:00.0;
    memory_total, memory_used: bytes, 0 where the driver does not tell."""

    name: str
    address: str
    memory_total: int
    memory_used: int


def nvidia_devices(root: Path = ROOT) -> int:
    """NVIDIA GPUs by the driver's files."""
    files = [path for path in (root / "dev").glob("nvidia*") if path.name[6:].isdecimal()]
    return len(files) or sum(1 for _ in (root / "proc/driver/nvidia/gpus").glob("*"))


def amd_devices(root: Path = ROOT) -> list[AmdGpu]:
    """AMD GPUs that this process may use, in the order of the kernel's topology."""
    if not (root / "dev/kfd").exists():
        return []
    nodes = (root / KFD_NODES).glob("[0-9]*")
    return list(_amd_gpus(root, sorted(nodes, key=lambda path: int(path.name))))


def _amd_gpus(root: Path, nodes: list[Path]) -> Iterator[AmdGpu]:
    for node in nodes:
        facts = _properties(node / "properties")
        if facts.get("simd_count") and _has_render_file(root, facts):
            address = _pci_address(facts)
            device = root / "sys/bus/pci/devices" / address
            yield AmdGpu(
                _instruction_set(facts.get("gfx_target_version", 0)),
                address,
                _whole(device / "mem_info_vram_total"),
                _whole(device / "mem_info_vram_used"),
            )


def gpus_on_bus(root: Path = ROOT) -> dict[Vendor, int]:
    """PCI devices that are GPUs, by vendor, whether a driver is loaded for them or not."""
    found: dict[Vendor, int] = {}
    for device in (root / "sys/bus/pci/devices").glob("*"):
        vendor = VENDORS.get(_text(device / "vendor"))
        if vendor and _text(device / "class").startswith(BUS_CLASSES[vendor]):
            found[vendor] = found.get(vendor, 0) + 1
    return found


def amd_driver(root: Path = ROOT) -> str:
    """The version of the driver amdgpu; empty for the one that is part of the kernel."""
    return _text(root / "sys/module/amdgpu/version")


def count_visible(present: int, vendor: Vendor, environment: Mapping[str, str]) -> int:
    """How many of `present` GPUs the vendor's variables leave.

    >>> count_visible(8, "NVIDIA", {"CUDA_VISIBLE_DEVICES": "2,3"})
    2
    """
    for name in VISIBLE[vendor]:
        if name in environment:
            named = [word for word in environment[name].split(",") if word.strip()]
            present = min(present, len([word for word in named if word.strip() != "-1"]))
    return present


def _has_render_file(root: Path, facts: Mapping[str, int]) -> bool:
    return (root / f"dev/dri/renderD{facts.get('drm_render_minor', 0)}").exists()


def _pci_address(facts: Mapping[str, int]) -> str:
    """The domain, and the location's bus, device (5 bits) and function (3 bits)."""
    place = facts.get("location_id", 0)
    slot = f"{place >> 3 & 31:02x}.{place & 7}"
    return f"{facts.get('domain', 0):04x}:{place >> 8 & 255:02x}:{slot}"


def _instruction_set(version: int) -> str:
    """90402 as gfx942, 90010 as gfx90a: major, and minor and step in hexadecimal digits."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _properties(path: Path) -> dict[str, int]:
    """`name number` a line; empty for a node whose file this process may not read."""
    pairs = re.findall(r"^(\w+) (\d+)$", _text(path), re.M)
    return {name: int(value) for name, value in pairs}


def _whole(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdecimal() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", errors="replace").strip()
    except OSError:
        return ""
