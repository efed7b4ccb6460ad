"""Reports of hosts that do not exist: a healthy one, with sections changed by keyword."""

from __future__ import annotations

from typing import Any

from mpctl.run.doctor.documents import (
    Folder,
    Gpus,
    HostReport,
    Interface,
    Limits,
    Memory,
    NetworkFacts,
    PairResult,
    Processor,
    Software,
    TorchFacts,
    Transfer,
)
from mpctl.run.hosts.probes import Gpu, HostAnswer

GIB = 1 << 30
SECTIONS: dict[str, Any] = {
    "software": Software(
        python="3.12.3",
        executable="/opt/venv/bin/python",
        mpctl="0.2.0",
        mpctl_folder="/opt/venv/lib/mpctl",
        torch="2.13.0",
        triton="3.9.0",
        system="Linux 6.8.0",
        architecture="x86_64",
        user="ada",
        home="/home/ada",
        encoding="utf-8",
        environment={},
    ),
    "torch": TorchFacts(
        version="2.13.0",
        import_seconds=1.5,
        cuda_built=None,
        nccl=None,
        has_gloo=True,
        has_nccl=False,
        gpus=0,
        gpu_names=[],
        gloo_error=None,
        nccl_error=None,
        cuda_error=None,
    ),
    "processor": Processor(
        model="EPYC", cores=64, logical=64, physical=32, sockets=1, numa_nodes=1, quota=None, load=0.1
    ),
    "memory": Memory(
        total=256 * GIB,
        available=200 * GIB,
        group_free=None,
        swap_total=0,
        swap_used=0,
        shm_total=128 * GIB,
        shm_free=128 * GIB,
    ),
    "limits": Limits(
        open_files=65536, open_files_hard=65536, processes=100_000, locked_memory=None, group_processes=None
    ),
    "gpus": Gpus(tool="none", visible=None, devices=[], device_files=0, links=[], error=None),
    "network": NetworkFacts(
        host="n1",
        host_addresses=["10.0.0.1"],
        host_error=None,
        interfaces=[
            Interface(name="eth0", is_up=True, addresses=["10.0.0.1"], speed=10**11, mtu=9000),
            Interface(name="lo", is_up=True, addresses=["127.0.0.1"], speed=None, mtu=65536),
        ],
        default_interface="eth0",
        towards="eth0",
        infiniband=[],
        gloo_setting=None,
        nccl_setting=None,
        first_port=32768,
        last_port=60999,
        used_ports=10,
        loopback_error=None,
    ),
    "folder": Folder(
        path="/shared/runs",
        probed="/shared",
        device="nfs4",
        total=1000 * GIB,
        free=900 * GIB,
        write_error=None,
        lock_error=None,
        map_error=None,
        write_rate=5e8,
        sync_seconds=0.002,
        is_shared=True,
    ),
}


def host(name: str = "n1", **changes: Any) -> HostReport:
    """A healthy host; `memory={"available": 0}` changes one section, `torch=None` takes it away."""
    sections = dict(SECTIONS)
    top = {key: value for key, value in changes.items() if key not in sections}
    for key in sections.keys() & changes.keys():
        change = changes[key]
        sections[key] = sections[key].model_copy(update=change) if change is not None else None
    return HostReport(host=name, unix_time=1000.0, **sections, **top)


def gpu_host(name: str = "n1", count: int = 8, link: str = "NV18", **changes: Any) -> HostReport:
    """A healthy host with GPUs, each two connected by `link`."""
    cuda = {
        "cuda_built": "12.8",
        "nccl": "2.27.3",
        "has_nccl": True,
        "gpus": count,
        "gpu_names": ["NVIDIA H100 80GB HBM3"] * count,
    }
    gpus = {
        "tool": "nvidia-smi",
        "devices": [gpu(index) for index in range(count)],
        "device_files": count,
        "links": [["X" if a == b else link for b in range(count)] for a in range(count)],
    }
    torch = {**cuda, **changes.pop("torch", {})}
    return host(name, torch=torch, gpus={**gpus, **changes.pop("gpus", {})}, **changes)


def gpu(index: int, **changes: Any) -> Gpu:
    healthy = Gpu(
        index=index,
        name="NVIDIA H100 80GB HBM3",
        memory_total=80 * GIB,
        memory_used=0,
        driver="570.86.15",
        mig=False,
        uncorrected_errors=0,
        processes=0,
    )
    return healthy.model_copy(update=changes)


def pair(first: int, second: int, rate: float = 1e9, latency: float = 50e-6) -> PairResult:
    transfers = [Transfer(size=1 << 20, rate=rate)]
    return PairResult(
        first=first,
        second=second,
        connect_seconds=1e-3,
        latency=latency,
        offset=0.0,
        forward=transfers,
        backward=transfers,
    )


def answer(text: str, *, code: int | None = 0, errors: str = "") -> HostAnswer:
    return HostAnswer(code, text, errors, sent=1000.0, received=1001.0)
