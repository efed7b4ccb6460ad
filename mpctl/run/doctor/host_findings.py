"""Findings on a single host and its network, independent of the job."""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.core.units import bytes_text, plural, seconds_text
from mpctl.run.doctor.documents import (
    Finding,
    Folder,
    Gpus,
    HostReport,
    Interface,
    Limits,
    Memory,
    NetworkFacts,
    Processor,
    Software,
    TorchFacts,
    error,
    warning,
)
from mpctl.run.doctor.job import Needs
from mpctl.run.launch.environment import is_busy

LEAST_TORCH = (2, 11)
LEAST_FREE = 1 << 30
LEAST_SHM = 1 << 30
LEAST_RATE = 50e6
MOST_SYNC_SECONDS = 0.1
FEW_FILES, FEW_PROCESSES = 4096, 4096
BUSY_GPU = 1 << 30
FEW_PORTS, LEAST_PORTS = 1000, 64
RDMA_BYTES = 1 << 30
VOLATILE = ("tmpfs", "ramfs")
SLOWS_DOWN = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "NCCL_P2P_DISABLE": "GPUs of a host do not exchange directly",
    "NCCL_SHM_DISABLE": "ranks of a host exchange over the network",
    "NCCL_IB_DISABLE": "hosts exchange by TCP instead of RDMA",
    "TORCH_DISTRIBUTED_DEBUG": "torch checks every collective",
}


def host_findings(host: HostReport, needs: Needs, *, several: bool) -> Iterator[Finding]:
    """Everything that is wrong with a host. several: whether other hosts take part."""
    yield from _failures(host)
    if host.software is not None:
        yield from _software(host.software)
    if host.torch is not None:
        yield from _torch(host.torch, host.gpus, needs)
        yield from _kernels(host.torch, host.software)
    if host.gpus is not None:
        yield from _gpus(host.gpus)
    if host.processor is not None:
        yield from _processor(host.processor)
    if host.memory is not None:
        yield from _memory(host.memory, host.gpus)
    if host.limits is not None:
        yield from _limits(host.limits)
    if host.network is not None:
        if host.network.loopback_error:
            hint = "ip link set lo up"
            yield error("loopback-down", "network", host.network.loopback_error, hint)
        yield from _ports(host.network)
        yield from _settings(host.network)
        yield from _rdma(host.network, host.limits)
    if host.folder is not None:
        yield from _folder(host.folder, several=several)


def _failures(host: HostReport) -> Iterator[Finding]:
    """Probes without a result. Without torch, or without any answer, nothing can be launched."""
    for failure in host.failures:
        if failure.probe == "torch":
            hint = "try `python -c 'import torch'` there; reinstall mpctl, which needs torch"
            yield error("torch-unusable", "torch", failure.error, hint)
        elif failure.probe == "host":
            hint = "try `python -m mpctl --version` there, with the same Python"
            yield error("host-silent", "host", failure.error, hint)
        elif failure.probe == "folder":
            message = f"could not be measured: {failure.error}"
            hint = "see whether its file system hangs: `ls` and `df` there; or another --run-dir"
            yield error("run-dir-unusable", "run directory", message, hint)
        else:
            yield warning("probe-failed", failure.probe, f"not measured: {failure.error}")


def _software(software: Software) -> Iterator[Finding]:
    if software.torch is None:
        hint = f"install it for {software.executable}: pip install torch"
        yield error("torch-missing", "torch", "it is not installed", hint)
    elif parsed_version(software.torch) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        message = f"version {software.torch}, mpctl needs {least} or newer"
        yield error("torch-old", "torch", message, f"pip install 'torch>={least}'")
    if software.encoding.lower().replace("-", "") != "utf8":
        message = f"file names are read as {software.encoding}"
        hint = "set LC_ALL=C.UTF-8 or PYTHONUTF8=1"
        yield warning("not-utf8", "locale", message, hint)
    for name, effect in SLOWS_DOWN.items():
        value = software.environment.get(name, "0")
        if value not in ("", "0", "OFF", "INFO"):
            hint = f"unset {name}, unless it is meant"
            yield warning("slow-setting", name, f"is {value}: {effect}", hint)


def parsed_version(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0)."""
    words = text.partition("+")[0].split(".")
    return tuple(int(word) for word in words if word.isdecimal())


def _torch(torch: TorchFacts, gpus: Gpus | None, needs: Needs) -> Iterator[Finding]:
    present = 0 if gpus is None else max(len(gpus.devices), gpus.device_files)
    on_gpus = needs.device == "cuda" or (needs.device is None and present > 0)
    say = error if needs.device == "cuda" else warning
    if present and gpus is not None and gpus.visible == "":
        message = f"hides all {plural(present, 'GPU')} of this host"
        hint = "unset CUDA_VISIBLE_DEVICES"
        yield say("gpus-hidden", "CUDA_VISIBLE_DEVICES", message, hint)
    elif on_gpus and torch.cuda_built is None and torch.hip_built is None:
        maker = "ROCm" if gpus is not None and gpus.tool == "amdgpu" else "CUDA"
        hint = f"install a build of torch with {maker}: https://pytorch.org/get-started/locally"
        yield say("torch-without-cuda", "torch", f"{torch.version} has no {maker}", hint)
    elif on_gpus and (torch.cuda_error or not torch.gpus):
        message = f"finds no GPU: {torch.cuda_error or 'none is visible'}"
        hint = "see that the driver is not older than torch's CUDA (nvidia-smi shows both)"
        yield say("cuda-unusable", "torch", message, hint)
    elif on_gpus and not torch.has_nccl:
        hint = "install a build of torch with NCCL"
        yield say("nccl-missing", "torch", f"{torch.version} has no NCCL", hint)
    if torch.nccl_error:
        hint = "NCCL_DEBUG=INFO tells more"
        yield say("nccl-fails", "NCCL", f"an all-reduce of one rank failed: {torch.nccl_error}", hint)
    say = error if not on_gpus else warning
    if not torch.has_gloo:
        yield say("gloo-missing", "torch", f"{torch.version} has no gloo", "install another build")
    elif torch.gloo_error:
        hint = "set GLOO_SOCKET_IFNAME to an interface that is up"
        yield say("gloo-fails", "gloo", f"an all-reduce of one rank failed: {torch.gloo_error}", hint)


def _kernels(torch: TorchFacts, software: Software | None) -> Iterator[Finding]:
    """GPUs without the compiler of the fused kernels train, slower and in more memory."""
    if torch.gpus and software is not None and software.triton is None:
        message = (
            "it is not installed: dropout, rotary positions and activations take many kernels "
            "for one, and attention dropout holds scores in memory"
        )
        hint = f"install it for {software.executable}: pip install triton"
        yield warning("triton-missing", "triton", message, hint)


def _gpus(gpus: Gpus) -> Iterator[Finding]:
    if gpus.on_bus and not gpus.device_files:
        message = f"{plural(gpus.on_bus, 'GPU')} on the PCI bus, but no driver offers one here"
        hint = "load the driver (`lspci -k` tells which), or give the container its GPUs (--gpus all)"
        yield warning("gpu-driver-missing", "GPUs", message, hint)
    if gpus.error:
        hint = "see that the NVIDIA driver is loaded: `nvidia-smi` there"
        yield warning("nvidia-smi-fails", "GPUs", f"nvidia-smi: {gpus.error}", hint)
    busy = [gpu for gpu in gpus.devices if gpu.processes or gpu.memory_used > BUSY_GPU]
    if busy:
        names = ", ".join(str(gpu.index) for gpu in busy)
        used = bytes_text(max(gpu.memory_used for gpu in busy))
        message = f"GPU {names} in use by other processes, up to {used} taken"
        yield warning("gpu-busy", "GPUs", message, "end them: `nvidia-smi` lists their process ids")
    if broken := [gpu for gpu in gpus.devices if gpu.uncorrected_errors]:
        names = ", ".join(f"{gpu.index} ({gpu.uncorrected_errors})" for gpu in broken)
        message = f"uncorrected memory errors on GPU {names}"
        hint = "restart the host, or take the GPU out of use: its results cannot be relied on"
        yield warning("gpu-memory-errors", "GPUs", message, hint)
    if any(gpu.mig for gpu in gpus.devices):
        message = "MIG is enabled: NCCL cannot connect slices of a GPU with each other"
        yield warning("gpu-mig", "GPUs", message, "nvidia-smi -mig 0, or one rank a host")


def _processor(processor: Processor) -> Iterator[Finding]:
    if processor.quota is not None and processor.quota < processor.cores:
        message = (
            f"the control group grants {processor.quota:g} of {processor.cores} processors: more "
            "threads than that are stopped again and again"
        )
        hint = "raise the limit; without launch.threads_per_rank mpctl divides what is granted"
        yield warning("cpu-quota", "processors", message, hint)
    if processor.load is not None and is_busy(processor.load, processor.cores):
        message = (
            f"busy: {processor.load:.1f} processes ran in the last minute, on {plural(processor.cores, 'processor')}"
        )
        yield warning("host-busy", "processors", message, "figures of speed here say little")


def _memory(memory: Memory, gpus: Gpus | None) -> Iterator[Finding]:
    if memory.free < LEAST_FREE:
        message = f"{bytes_text(memory.free)} are free"
        limit = memory.group_free is not None and memory.group_free < memory.available
        hint = "raise the memory limit of the container or job" if limit else "end other processes"
        yield warning("memory-low", "memory", message, hint)
    if memory.swap_used > memory.total // 10:
        message = f"{bytes_text(memory.swap_used)} are swapped out"
        yield warning("memory-swapped", "memory", message, "end other processes: ranks would stall")
    count = 0 if gpus is None else len(gpus.devices)
    if count > 1 and memory.shm_total is not None and memory.shm_total < LEAST_SHM:
        message = f"{bytes_text(memory.shm_total)} in all; NCCL exchanges there between {count} GPUs"
        hint = "docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir of medium Memory"
        yield warning("shm-small", "/dev/shm", message, hint)


def _limits(limits: Limits) -> Iterator[Finding]:
    files, hard = limits.open_files, limits.open_files_hard
    if files is not None and files < FEW_FILES:
        most = "unlimited" if hard is None else str(hard)
        hint = f"ulimit -n {most}" if hard is None or hard > files else "raise it: limits.conf"
        message = f"{files:,} open files a process; every peer and every shard takes some"
        yield warning("few-open-files", "limits", message, hint)
    for count, source in ((limits.processes, "the user"), (limits.group_processes, "the group")):
        if count is not None and count < FEW_PROCESSES:
            message = f"{count:,} processes and threads for {source}; a rank has some 20 to 100"
            yield warning("few-processes", "limits", message, "ulimit -u, or the limit of pids")


def _folder(folder: Folder, *, several: bool) -> Iterator[Finding]:
    where, other = "run directory", "use a --run-dir on another file system"
    at = f"{folder.probed} ({folder.device})"
    if folder.write_error:
        message = f"cannot write to {at}: {folder.write_error}"
        yield error("run-dir-unwritable", where, message, "name a --run-dir that may be written")
        return
    if folder.lock_error:
        message = f"locks (flock) fail in {at}: {folder.lock_error}"
        hint = f"{other}, or mount it with locks (Lustre: -o flock)"
        yield error("run-dir-without-locks", where, message, hint)
    if folder.map_error:
        message = f"files of {at} cannot be mapped as shared memory: {folder.map_error}"
        yield error("run-dir-without-mmap", where, message, other)
    if several and folder.is_shared is False:
        message = f"{folder.probed} is not the launcher's: what it wrote there cannot be read"
        hint = "use a --run-dir on a file system that all hosts mount under the same path"
        yield error("run-dir-not-shared", where, message, hint)
    if folder.free < LEAST_FREE:
        message = f"{bytes_text(folder.free)} are free in {at}"
        yield warning("disk-low", where, message, other)
    if folder.write_rate is not None and folder.write_rate < LEAST_RATE:
        message = f"{at} writes {bytes_text(folder.write_rate)} a second"
        yield warning("disk-slow", where, message, f"{other}: checkpoints would take long")
    if folder.sync_seconds is not None and folder.sync_seconds > MOST_SYNC_SECONDS:
        message = f"{at} takes {seconds_text(folder.sync_seconds)} to make 4 KiB durable (fsync)"
        yield warning("disk-slow-sync", where, message, other)
    if folder.device in VOLATILE:
        message = f"{at} is in memory: a run there is lost when the host goes down"
        yield warning("disk-volatile", where, message, other)


def used_interface(network: NetworkFacts) -> Interface | None:
    """The interface that gloo uses: that of GLOO_SOCKET_IFNAME, or else the one that leads to the
    first host, which a launch sets for its ranks."""
    wanted = (network.gloo_setting or "").split(",")[0] or network.towards
    return next((each for each in network.interfaces if each.is_up and each.name == wanted), None)


def chosen_by(setting: str, name: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME chooses an interface: prefixes by commas, `=eth0` for an exact
    name, `^docker` for all others (NCCL's documentation, environment variables)."""
    is_excluding, words = setting.startswith("^"), setting.lstrip("^")
    is_exact, names = words.startswith("="), words.lstrip("=").split(",")
    matches = any(name == word if is_exact else name.startswith(word) for word in names if word)
    return matches != is_excluding


def _ports(network: NetworkFacts) -> Iterator[Finding]:
    size = network.last_port - network.first_port + 1
    free = size - network.used_ports
    if free >= FEW_PORTS:
        return
    message = (
        f"{plural(max(0, free), 'port')} of {network.first_port}-{network.last_port} free; every "
        "connection between ranks takes one"
    )
    say = error if free < LEAST_PORTS else warning
    hint = "sysctl net.ipv4.ip_local_port_range='32768 60999', or end what holds them (ss -t)"
    yield say("few-ports", "network", message, hint)


def _settings(network: NetworkFacts) -> Iterator[Finding]:
    """GLOO_SOCKET_IFNAME takes exact names, NCCL_SOCKET_IFNAME patterns."""
    up = [each.name for each in network.interfaces if each.is_up]
    gloo = [name for name in (network.gloo_setting or "").split(",") if name]
    if missing := [name for name in gloo if name not in up]:
        message = f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, which is not up here"
        yield error("interface-missing", "network", message, f"interfaces: {', '.join(up)}")
    nccl = network.nccl_setting
    if nccl and not any(chosen_by(nccl, name) for name in up):
        message = f"NCCL_SOCKET_IFNAME={nccl} chooses none of the interfaces that are up"
        yield error("interface-missing", "network", message, f"interfaces: {', '.join(up)}")


def _rdma(network: NetworkFacts, limits: Limits | None) -> Iterator[Finding]:
    active = [port for port in network.infiniband if port.state == "ACTIVE"]
    down = [port for port in network.infiniband if port.state != "ACTIVE"]
    if active and down:
        names = ", ".join(f"{port.device}:{port.port} {port.state}" for port in down)
        message = f"RDMA ports not active: {names}"
        yield warning("rdma-port-down", "network", message, "ibstat there; NCCL uses the others")
    locked = None if limits is None else limits.locked_memory
    if active and locked is not None and locked < RDMA_BYTES:
        message = f"{locked >> 20:,} MiB of memory may be locked, which RDMA needs for its buffers"
        yield warning("locked-memory", "network", message, "ulimit -l unlimited (limits.conf)")
