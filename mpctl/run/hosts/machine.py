"""Cores, GPUs, free memory and versions of this host, found without importing torch.

GPUs are found by the files of their drivers. A container has the device files of its GPUs and often
no nvidia-smi; the driver's folder in /proc, the bus and the kernel's topology show all GPUs of the
host, whoever may use them. So the device files are counted first.

    NVIDIA  /dev/nvidia0, /dev/nvidia1, ...; where the driver has made none yet (it does at the
            first use), the folders of /proc/driver/nvidia/gpus
    AMD     nodes of /sys/class/kfd/kfd/topology with a simd_count, of which this process has the
            file /dev/dri/renderDN and /dev/kfd (the driver amdgpu, which ROCm uses)
    bus     PCI devices of these vendors, also without a driver: a reason why none can be used

torch's ROCm builds use the names of CUDA, RCCL that of NCCL, so mpctl runs both as `cuda`. In a
container with /dev/nvidia2 and /dev/nvidia5 a host of 8 GPUs has 2.

Containers and batch systems limit memory by control groups; the machine's figures do not show the
limit. Version 2 has memory.max, memory.current and memory.events, version 1
memory.limit_in_bytes, memory.usage_in_bytes and memory.oom_control. Source: the kernel's
documentation of cgroup-v1/memory and cgroup-v2. Hosts without control groups have no limit.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil

from mpctl import __version__
from mpctl.core.cores import CGROUPS, OWN_CGROUP, control_groups, core_count

HOSTS = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "PET_NNODES", "GROUP_WORLD_SIZE")
"""Environment variables with a number of hosts, the innermost first: of a Slurm step, of its job,
of torchrun's world."""
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
NO_LIMIT = 1 << 60  # version 1 writes a number near 2^63 for "none"
ABSENT = "not installed"
NO_RUN_DIR = "does not see the run directory of the launcher"
"""Message of a node agent that cannot read the key, on stderr after the name of its host."""
BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Machine:
    """cores: that this process may keep busy; gpus: that it may see; memory_bytes: free now, within
    the limit of the control group; hosts: allocated by the scheduler, 1 without one; idle_gpus: on
    the PCI bus, if no driver offers any GPU to this process."""

    cores: int
    gpus: int
    memory_bytes: int
    hosts: int = 1
    idle_gpus: int = 0


def this_machine() -> Machine:
    """This machine as this process may use it: CPU affinity and quota,
    CUDA_VISIBLE_DEVICES (of AMD's GPUs ROCR_ and HIP_VISIBLE_DEVICES too) and the memory limit are
    respected."""
    nvidia = count_visible(_nvidia_gpus(), "NVIDIA", os.environ)
    has_files = bool(nvidia_devices() or amd_devices())
    return Machine(
        cores=core_count(),
        gpus=nvidia or count_visible(len(amd_devices()), "AMD", os.environ),
        memory_bytes=_free_memory(),
        hosts=hosts_in(os.environ),
        idle_gpus=0 if has_files else sum(gpus_on_bus().values()),
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


@dataclass(frozen=True)
class AmdGpu:
    """An AMD GPU. name: its instruction set, gfx942; address: on the PCI bus, 0000:05:00.0;
    memory_total, memory_used: bytes, 0 where the driver does not report them."""

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
    gpus = (_amd_gpu(root, node) for node in sorted(nodes, key=lambda path: int(path.name)))
    return [gpu for gpu in gpus if gpu is not None]


def _amd_gpu(root: Path, node: Path) -> AmdGpu | None:
    """The GPU of a node of the topology; None for a processor, for a node that this process may
    not read, and for a GPU without a render file."""
    pairs = re.findall(r"^(\w+) (\d+)$", read_text(node / "properties"), re.M)
    facts = {name: int(value) for name, value in pairs}
    render = root / f"dev/dri/renderD{facts.get('drm_render_minor', 0)}"
    if not facts.get("simd_count") or not render.exists():
        return None
    # The domain, and the location's bus, device (5 bits) and function (3 bits).
    place = facts.get("location_id", 0)
    slot = f"{place >> 3 & 31:02x}.{place & 7}"
    address = f"{facts.get('domain', 0):04x}:{place >> 8 & 255:02x}:{slot}"
    # 90402 is gfx942, 90010 is gfx90a: major, and minor and step in hexadecimal digits.
    version = facts.get("gfx_target_version", 0)
    name = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    device = root / "sys/bus/pci/devices" / address
    total, used = (_number(device / f"mem_info_vram_{part}") or 0 for part in ("total", "used"))
    return AmdGpu(name, address, total, used)


def gpus_on_bus(root: Path = ROOT) -> dict[Vendor, int]:
    """The number of PCI devices that are GPUs, by vendor, with or without a driver."""
    found: dict[Vendor, int] = {}
    for device in (root / "sys/bus/pci/devices").glob("*"):
        vendor = VENDORS.get(read_text(device / "vendor"))
        if vendor and read_text(device / "class").startswith(BUS_CLASSES[vendor]):
            found[vendor] = found.get(vendor, 0) + 1
    return found


def amd_driver(root: Path = ROOT) -> str:
    """The version of the driver amdgpu; empty for the one that is part of the kernel."""
    return read_text(root / "sys/module/amdgpu/version")


def count_visible(present: int, vendor: Vendor, environment: Mapping[str, str]) -> int:
    """Return the number of `present` GPUs that the vendor's variables leave visible.

    >>> count_visible(8, "NVIDIA", {"CUDA_VISIBLE_DEVICES": "2,3"})
    2
    """
    for name in VISIBLE[vendor]:
        if name in environment:
            named = [word for word in environment[name].split(",") if word.strip()]
            present = min(present, len([word for word in named if word.strip() != "-1"]))
    return present


def memory_kills(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Return the number of processes of this control group that the kernel has ever killed for lack of memory. root:
    where the groups are mounted; own: the file that names the group of this process."""
    for group in control_groups("memory", root, own):
        for name in ("memory.events", "memory.oom_control"):
            counts = _table(group / name)
            if "oom_kill" in counts:
                return counts["oom_kill"]
    return 0


def memory_headroom(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int | None:
    """Bytes that this process may still allocate within the limits of its group and the groups
    above it; None without a limit. Cached files do not count as used: the kernel gives them up."""
    free = [size for group in control_groups("memory", root, own) if (size := _free_bytes(group)) is not None]
    return min(free, default=None)


def _free_bytes(group: Path) -> int | None:
    limit = _number(group / "memory.max", group / "memory.limit_in_bytes")
    if limit is None or limit >= NO_LIMIT:
        return None
    used = _number(group / "memory.current", group / "memory.usage_in_bytes") or 0
    cached = _table(group / "memory.stat")
    return max(0, limit - used + cached.get("total_inactive_file", cached.get("inactive_file", 0)))


def _number(*paths: Path) -> int | None:
    """The number in the first of these files that has one; `max` is not a number."""
    words = (read_text(path) for path in paths)
    return next((int(word) for word in words if word.isdecimal()), None)


def _table(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in read_text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


@dataclass(frozen=True)
class HostFacts:
    """Facts by which hosts are compared. python, mpctl, torch: versions; executable: the
    interpreter that runs ranks; boot: the kernel's boot id with the host name, which two names of
    one machine share; processor: its name."""

    name: str
    machine: Machine
    python: str
    mpctl: str
    torch: str
    executable: str
    boot: str = ""
    processor: str = ""


def raise_file_limit(files: int) -> int:
    """Let this process, and those that it starts, have so many open files where the system's bound
    allows them. Returns how many it may have now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = files if hard == resource.RLIM_INFINITY else min(files, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return files if soft == resource.RLIM_INFINITY else soft
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def host_facts() -> HostFacts:
    name, boot = socket.gethostname(), read_text(BOOT)
    return HostFacts(
        name=name,
        machine=this_machine(),
        python=platform.python_version(),
        mpctl=__version__,
        torch=installed_version("torch") or ABSENT,
        executable=sys.executable,
        boot=f"{name} {boot}" if boot else "",
        processor=processor_name(),
    )


def installed_version(package: str) -> str | None:
    """Return the version in a package's metadata, or None; imports nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor_name() -> str:
    """The processor's name from Linux, elsewhere from the platform module."""
    name = re.search(r"^model name\s*:\s*(.+)$", read_text(Path("/proc/cpuinfo")), re.M)
    return name[1] if name else platform.processor() or platform.machine()


def read_text(path: Path) -> str:
    """Read a file of the kernel, without white space around it; empty if it cannot be read."""
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""
