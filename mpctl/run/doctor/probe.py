"""Measures one host: `python -m mpctl.run.doctor.probe` reads a ProbeRequest from stdin (JSON) and
prints a HostReport.

All probes run at the same time, each in a thread with a time limit. One that fails or times out is
a line in `failures`; the process still ends. What the launcher also measures of a host is read by
mpctl/run/hosts/.

GPUs are read from `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` (sizes in MiB),
`--query-compute-apps=gpu_uuid` and the matrix of `nvidia-smi topo -m`, whose words are NVIDIA's:
NV18 (18 NVLinks), PIX, PXB (PCIe bridges), PHB (a host bridge), NODE (a NUMA node), SYS (between
them). Without nvidia-smi, and for AMD's, the files of their drivers count.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
from pydantic import BaseModel

import mpctl
from mpctl.core.cores import CGROUPS, cpu_quota, usable_cores
from mpctl.core.errors import RunFailed
from mpctl.run.doctor.documents import (
    Gpus,
    HostReport,
    InfiniBandPort,
    Interface,
    Limits,
    Memory,
    NetworkFacts,
    ProbeFailure,
    ProbeRequest,
    Processor,
    Software,
    TorchFacts,
)
from mpctl.run.doctor.filesystem import probe_folder
from mpctl.run.doctor.pairs import measure_loopback
from mpctl.run.hosts.machine import (
    ROOT,
    amd_devices,
    amd_driver,
    gpus_on_bus,
    installed_version,
    memory_headroom,
    nvidia_devices,
    processor_name,
    read_text,
)
from mpctl.run.hosts.modules import end_with_parent
from mpctl.run.hosts.network import free_port, interface_towards
from mpctl.run.hosts.probes import Gpu, NoAnswer, RunningProbe, nvidia_gpus, run_here, run_tool

TORCH_PROBE = "mpctl.train.runtime.probes.torch_report"
CHANGES_RUNS = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "OMP_",
    "MKL_",
    "KMP_",
    "CUDA_",
    "NVIDIA_VISIBLE",
    "MASTER_",
    "PYTHONPATH",
    "PYTHONHOME",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "UCX_",
    "FI_",
    "SLURM_NNODES",
    "SLURM_JOB_NODELIST",
    "PET_",
    "LC_ALL",
    "LANG",
    "PYTORCH_",
)
"""Prefixes of the environment variables that are reported: none of them has a password."""
MBIT = 1_000_000
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
DEFAULT_RANGE = (32768, 60999)  # Linux's own
INFINIBAND = Path("/sys/class/infiniband")

# ---------------------------------------------------------------- software


def probe_software() -> Software:
    """Read the versions of software and the user of this host, without importing torch."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without an entry in passwd, as containers have
        user = str(os.getuid())
    return Software(
        python=platform.python_version(),
        executable=sys.executable,
        mpctl=mpctl.__version__,
        mpctl_folder=str(Path(mpctl.__file__).resolve().parent),
        torch=installed_version("torch"),
        triton=installed_version("triton"),
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        user=user,
        home=str(Path("~").expanduser()),
        encoding=sys.getfilesystemencoding(),
        environment=relevant_variables(os.environ),
    )


def relevant_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how torch, NCCL or Python run, sorted by name."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(CHANGES_RUNS)}


def probe_torch(seconds: float) -> TorchFacts:
    """Return the facts of torch from a separate process. Raises RuntimeError with the reason if torch cannot be
    imported, crashes or takes longer than `seconds`."""
    try:
        return run_here(TORCH_PROBE, "", seconds).read(TorchFacts)
    except NoAnswer as error:
        raise RuntimeError(f"torch could not be used: {error}") from None


# ---------------------------------------------------------------- processors, memory, limits


def probe_processor() -> Processor:
    sockets = set(re.findall(r"^physical id\s*:.*$", read_text(Path("/proc/cpuinfo")), re.M))
    return Processor(
        model=processor_name(),
        cores=len(usable_cores()),
        logical=os.cpu_count() or 1,
        physical=psutil.cpu_count(logical=False),
        sockets=len(sockets) or None,
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        quota=cpu_quota(),
        load=os.getloadavg()[0],
    )


def probe_memory() -> Memory:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    try:
        shm = shutil.disk_usage("/dev/shm")
    except OSError:
        shm = None
    return Memory(
        total=memory.total,
        available=memory.available,
        group_free=memory_headroom(),
        swap_total=swap.total,
        swap_used=swap.used,
        shm_total=shm.total if shm else None,
        shm_free=shm.free if shm else None,
    )


def probe_limits() -> Limits:
    """Limits of this process, which its children inherit."""

    def limit(kind: int, place: int = 0) -> int | None:
        value = resource.getrlimit(kind)[place]
        return None if value in (resource.RLIM_INFINITY, -1) else value

    most, now = (read_text(CGROUPS / name) for name in ("pids.max", "pids.current"))
    is_known = most.isdecimal() and now.isdecimal()
    return Limits(
        open_files=limit(resource.RLIMIT_NOFILE),
        open_files_hard=limit(resource.RLIMIT_NOFILE, 1),
        processes=limit(resource.RLIMIT_NPROC),
        locked_memory=limit(resource.RLIMIT_MEMLOCK),
        group_processes=max(0, int(most) - int(now)) if is_known else None,
    )


# ---------------------------------------------------------------- GPUs


def probe_gpus(root: Path = ROOT) -> Gpus:
    """GPUs by nvidia-smi; their number by the device files where it is missing; else those of AMD.
    root: of the file system."""
    tool = shutil.which("nvidia-smi")
    files, amd = nvidia_devices(root), amd_devices(root)
    devices: list[Gpu] = []
    said = None
    if tool is not None:
        try:
            devices = nvidia_gpus(tool)
        except OSError as error:
            said = str(error)
    elif not files:
        driver = amd_driver(root) or "amdgpu"
        devices = [
            Gpu(
                index=index,
                name=f"AMD {gpu.name}",
                memory_total=gpu.memory_total,
                memory_used=gpu.memory_used,
                driver=driver,
                mig=False,
                uncorrected_errors=None,
                processes=0,
            )
            for index, gpu in enumerate(amd)
        ]
    return Gpus(
        tool="nvidia-smi" if tool else "device files" if files else "amdgpu" if amd else "none",
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        devices=devices,
        device_files=files or (0 if tool else len(amd)),
        on_bus=sum(gpus_on_bus(root).values()),
        links=parse_links(run_tool(tool, "topo", "-m").stdout, len(devices)) if tool else [],
        error=said,
    )


def parse_links(matrix: str, count: int) -> list[list[str]]:
    """The rows GPU0, GPU1, ... of `nvidia-smi topo -m`, `count` columns each; [] without them."""
    plain = re.sub("\x1b\\[[0-9;]*m", "", matrix)  # the header is underlined
    rows = [line.split() for line in plain.splitlines()]
    cells = [row[1 : count + 1] for row in rows if row and re.fullmatch(r"GPU\d+", row[0])]
    links = [row for row in cells if row and not row[0].startswith("GPU")]
    return links if len(links) == count and all(len(row) == count for row in links) else []


# ---------------------------------------------------------------- network


def probe_network(towards: str | None = None) -> NetworkFacts:
    """Interfaces with their addresses, what the host's name resolves to, free ports. towards: the
    address of the first host."""
    host, loopback_error = socket.gethostname(), None
    addresses, host_error = resolve(host)
    first, last = port_range(read_text(PORT_RANGE))
    try:
        free_port(2)
    except RunFailed as error:
        loopback_error = str(error)
    return NetworkFacts(
        host=host,
        host_addresses=addresses,
        host_error=host_error,
        interfaces=_interfaces(),
        default_interface=default_interface(read_text(Path("/proc/net/route"))),
        towards=None if towards is None else interface_towards(towards),
        infiniband=infiniband_ports(INFINIBAND),
        gloo_setting=os.environ.get("GLOO_SOCKET_IFNAME"),
        nccl_setting=os.environ.get("NCCL_SOCKET_IFNAME"),
        first_port=first,
        last_port=last,
        used_ports=_used_ports(first, last),
        loopback_error=loopback_error,
    )


def resolve(host: str) -> tuple[list[str], str | None]:
    """Return the IPv4 and IPv6 addresses of a host name, and the reason if there are none."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return [], error.strerror or str(error)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries)), None


def port_range(text: str) -> tuple[int, int]:
    """First and last ephemeral port in the kernel's form, `32768   60999`."""
    words = text.split()
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return DEFAULT_RANGE
    return int(words[0]), int(words[1])


def default_interface(routes: str) -> str | None:
    """The interface of the default route in /proc/net/route: its destination is 00000000."""
    rows = (line.split() for line in routes.splitlines())
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), None)


def infiniband_ports(root: Path) -> list[InfiniBandPort]:
    """The ports of all RDMA devices; their files say `4: ACTIVE` and `400 Gb/sec (4X NDR)`."""
    return [
        InfiniBandPort(
            device=port.parent.parent.name,
            port=int(port.name),
            state=read_text(port / "state").rpartition(":")[2].strip() or "unknown",
            rate=read_text(port / "rate") or "unknown",
            layer=read_text(port / "link_layer") or "unknown",
        )
        for port in sorted(root.glob("*/ports/[0-9]*"))
    ]


def _interfaces() -> list[Interface]:
    status = psutil.net_if_stats()
    internet = (socket.AF_INET, socket.AF_INET6)
    return [
        Interface(
            name=name,
            is_up=name in status and status[name].isup,
            addresses=[entry.address for entry in entries if entry.family in internet],
            speed=(status[name].speed * MBIT or None) if name in status else None,
            mtu=status[name].mtu if name in status else 0,
        )
        for name, entries in sorted(psutil.net_if_addrs().items())
    ]


def _used_ports(first: int, last: int) -> int:
    """Local TCP ports of the range that a socket of this host uses, whoever owns it."""
    text = "\n".join(read_text(Path(f"/proc/net/{name}")) for name in ("tcp", "tcp6"))
    words = (line.split() for line in text.splitlines())
    local = {row[1].rpartition(":")[2] for row in words if len(row) > 3 and ":" in row[1]}
    return sum(first <= int(port, 16) <= last for port in local)


# ---------------------------------------------------------------- all of them

Probe = Callable[[], BaseModel]


def report_host(request: ProbeRequest) -> HostReport:
    running = [RunningProbe(*each).start() for each in _probes(request)]
    for probe in running:
        probe.wait()
    if request.loopback:  # alone, since the others would slow it down
        last = RunningProbe[BaseModel]("loopback", measure_loopback, request.probe_seconds).start()
        last.wait()
        running.append(last)
    sections = {p.name: p.result for p in running if p.result is not None and p.error is None}
    return HostReport(
        host=socket.gethostname(),
        unix_time=time.time(),
        failures=[ProbeFailure(probe=p.name, error=p.error) for p in running if p.error],
        seconds={p.name: p.seconds for p in running if p.seconds is not None},
        **sections,  # type: ignore[arg-type]
    )


def _probes(request: ProbeRequest) -> list[tuple[str, Probe, float]]:
    """Section of HostReport, its probe and its time limit."""
    limit = request.probe_seconds
    probes: list[tuple[str, Probe, float]] = [
        ("processor", probe_processor, limit),
        ("software", probe_software, limit),
        ("memory", probe_memory, limit),
        ("limits", probe_limits, limit),
        ("gpus", probe_gpus, 4 * limit),
        ("network", lambda: probe_network(request.towards), limit),
    ]
    if request.run_dir is not None:
        run_dir, nonce_file, nonce = Path(request.run_dir), request.nonce_file, request.nonce
        probes.append(("folder", lambda: probe_folder(run_dir, nonce_file, nonce), limit))
    if request.torch_seconds > 0:
        seconds = request.torch_seconds
        probes.append(("torch", lambda: probe_torch(seconds), seconds + 5))
    return probes


def main() -> None:
    end_with_parent()
    report = report_host(ProbeRequest.model_validate_json(sys.stdin.read()))
    print(report.model_dump_json())
    sys.stdout.flush()
    os._exit(0)  # threads that hang in the kernel would be waited for


if __name__ == "__main__":
    main()
