"""What a job needs against what a host has."""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.doctor.diagnosis import Finding
from mpctl.doctor.documents import Gpus, HostReport, Limits, TorchFacts
from mpctl.doctor.needs import Needs
from mpctl.units import bytes_text, plural

FILES_OF_A_RANK = 256
THREADS_OF_A_RANK = 24
SLOW_LINKS = ("SYS", "NODE", "PHB")
LEGEND = {
    "SYS": "between NUMA nodes",
    "NODE": "within a NUMA node",
    "PHB": "over a PCIe host bridge",
}


def job_findings(host: HostReport, needs: Needs) -> Iterator[Finding]:
    """What this host lacks for its share of the job."""
    for finding in _lacking(host, needs):
        yield finding.model_copy(update={"hosts": [host.host]})


def _lacking(host: HostReport, needs: Needs) -> Iterator[Finding]:
    if needs.device == "cuda" and host.gpus is not None:
        yield from _gpus(host.gpus, host.torch, needs)
    if host.memory is not None and needs.memory_bytes > host.memory.free:
        yield _error(
            "world-fits-memory",
            "memory",
            f"{plural(needs.ranks, 'rank')} take {bytes_text(needs.memory_bytes)} at the peak of a "
            f"step, {bytes_text(host.memory.free)} are free",
            "use --recompute full, a smaller micro batch or fewer ranks on a host",
        )
    if host.folder is not None and needs.disk_bytes > host.folder.free:
        yield _error(
            "disk-holds-checkpoints",
            "run directory",
            f"the checkpoints of the job take {bytes_text(needs.disk_bytes)} at once, "
            f"{bytes_text(host.folder.free)} are free in {host.folder.probed}",
            "set checkpoint.keep_last, or use a --run-dir on a larger disk",
        )
    if host.limits is not None:
        yield from _limits(host.limits, needs)
    threads = needs.threads
    if host.processor is not None and threads and threads * needs.ranks > host.processor.cores:
        yield Finding(
            status="warning",
            rule="threads-exceed-cores",
            where="processors",
            hosts=[],
            message=f"{plural(needs.ranks, 'rank')} of {plural(threads, 'thread')} share "
            f"{plural(host.processor.cores, 'processor')}",
            hint="leave launch.threads_per_rank out: mpctl then divides the processors",
        )


def _gpus(gpus: Gpus, torch: TorchFacts | None, needs: Needs) -> Iterator[Finding]:
    count = len(gpus.devices) if torch is None else torch.gpus
    if count < needs.ranks:
        message = f"{plural(needs.ranks, 'rank')} need as many GPUs, {count} can be used"
        hint = f"plan for them: --gpus-per-node {count}" if count else "use --device cpu"
        yield _error("world-fits-machine", "GPUs", message, hint)
    short = [gpu for gpu in gpus.devices if gpu.memory_total - gpu.memory_used < needs.gpu_bytes]
    if short:
        free = min(gpu.memory_total - gpu.memory_used for gpu in short)
        names = ", ".join(str(gpu.index) for gpu in short)
        message = (
            f"a rank takes {bytes_text(needs.gpu_bytes)}, GPU {names} has {bytes_text(free)} free"
        )
        hint = "end other processes there, use --recompute full or a smaller micro batch"
        yield _error("gpu-memory-short", "GPUs", message, hint)
    links = {word for row in gpus.links for word in row}
    if slow := [word for word in SLOW_LINKS if word in links and needs.spans_tp]:
        message = f"some GPUs are connected {LEGEND[slow[0]]} only ({slow[0]}), and tp is used"
        hint = "a smaller --tp keeps its groups on GPUs with NVLink (nvidia-smi topo -m)"
        yield Finding(
            status="warning", rule="gpu-links-slow", where="GPUs", hosts=[], message=message,
            hint=hint
        )  # fmt: skip


def _limits(limits: Limits, needs: Needs) -> Iterator[Finding]:
    files = FILES_OF_A_RANK + 2 * needs.world_size  # gloo connects each rank with each other one
    if limits.open_files is not None and limits.open_files < files:
        message = f"{limits.open_files:,} open files a process, a rank may need {files:,}"
        yield _error("open-files-short", "limits", message, f"ulimit -n {files}")
    threads = needs.ranks * (THREADS_OF_A_RANK + (needs.threads or 1))
    for count in (limits.processes, limits.group_processes):
        if count is not None and count < threads:
            message = f"{count:,} processes and threads are allowed, the ranks may need {threads:,}"
            yield _error("processes-short", "limits", message, f"ulimit -u {threads}")


def _error(rule: str, where: str, message: str, hint: str) -> Finding:
    return Finding(status="error", rule=rule, where=where, hosts=[], message=message, hint=hint)
