"""Requirements of a job on every host, and findings on those that a launch does not check itself.

Memory of the host and the disk of checkpoints are checked by the launch (hosts/checks.py,
launch/preflight.py), whose reasons to refuse a job `mpctl doctor JOB` shows too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mpctl.core.cores import within_quota
from mpctl.core.units import bytes_text, plural
from mpctl.plan.planning.plan import Plan
from mpctl.run.doctor.documents import Finding, Gpus, HostReport, Limits, TorchFacts, error, warning
from mpctl.run.hosts.checks import Device
from mpctl.run.launch.control.server import files_of_launcher

FILES_OF_A_RANK = 256
THREADS_OF_A_RANK = 24
SLOW_LINKS = ("SYS", "NODE", "PHB")
LEGEND = {"SYS": "between NUMA nodes", "NODE": "within a NUMA node", "PHB": "over a PCIe host bridge"}


@dataclass(frozen=True, slots=True)
class Needs:
    """device: where ranks run, None without a job. nodes: hosts; ranks: on each host. gpu_bytes: of
    the fullest rank on its GPU at the peak of a step, 0 where it is not known. threads: of each rank,
    None where mpctl chooses. spans_tp: whether tp groups have several ranks.
    """

    device: Device | None = None
    nodes: int = 1
    ranks: int = 1
    gpu_bytes: int = 0
    threads: int | None = None
    spans_tp: bool = False

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks


def needs_of(plan: Plan, device: Device, *, one_host: bool) -> Needs:
    """Return the needs of a plan. one_host: all ranks run on one host, regardless of the plan's nodes (`--on local`).
    Raises InputError for a plan that is not legal."""
    plan.require_legal()
    job = plan.job
    nodes = 1 if one_host else job.cluster.nodes
    peaks = [stage.allocated_bytes for stage in plan.estimate.memory] if device == "cuda" and plan.estimate else []
    return Needs(
        device=device,
        nodes=nodes,
        ranks=job.world_size // nodes,
        gpu_bytes=max(peaks, default=0),
        threads=job.launch.threads_per_rank,
        spans_tp=job.parallel.tp > 1,
    )


def job_findings(host: HostReport, needs: Needs) -> Iterator[Finding]:
    if needs.device == "cuda" and host.gpus is not None:
        yield from _gpus(host.gpus, host.torch, needs)
    if host.limits is not None:
        yield from _limits(host.limits, needs)
    threads, processor = needs.threads, host.processor
    cores = within_quota(processor.cores, processor.quota) if processor is not None else 0
    if processor is not None and threads and threads * needs.ranks > cores:
        yield warning(
            "threads-exceed-cores",
            "processors",
            f"{plural(needs.ranks, 'rank')} of {plural(threads, 'thread')} share {plural(cores, 'processor')}",
            "leave launch.threads_per_rank out: mpctl then divides the processors",
        )


def _gpus(gpus: Gpus, torch: TorchFacts | None, needs: Needs) -> Iterator[Finding]:
    count = len(gpus.devices) if torch is None else torch.gpus
    if count < needs.ranks:
        message = f"{plural(needs.ranks, 'rank')} need as many GPUs, {count} can be used"
        hint = f"plan for them: --gpus-per-node {count}" if count else "use --device cpu"
        yield error("world-fits-machine", "GPUs", message, hint)
    short = [gpu for gpu in gpus.devices if gpu.memory_total - gpu.memory_used < needs.gpu_bytes]
    if short:
        free = min(gpu.memory_total - gpu.memory_used for gpu in short)
        names = ", ".join(str(gpu.index) for gpu in short)
        message = f"a rank takes {bytes_text(needs.gpu_bytes)}, GPU {names} has {bytes_text(free)} free"
        hint = "end other processes there, use --recompute full or a smaller micro batch"
        yield error("gpu-memory-short", "GPUs", message, hint)
    links = {word for row in gpus.links for word in row}
    if slow := [word for word in SLOW_LINKS if word in links and needs.spans_tp]:
        message = f"some GPUs are connected {LEGEND[slow[0]]} only ({slow[0]}), and tp is used"
        hint = "a smaller --tp keeps its groups on GPUs with NVLink (nvidia-smi topo -m)"
        yield warning("gpu-links-slow", "GPUs", message, hint)


def _limits(limits: Limits, needs: Needs) -> Iterator[Finding]:
    files = FILES_OF_A_RANK + 2 * needs.world_size  # gloo connects each rank with each other one
    if limits.open_files is not None and limits.open_files < files:
        message = f"{limits.open_files:,} open files a process, a rank may need {files:,}"
        yield error("open-files-short", "limits", message, f"ulimit -n {files}")
    files = files_of_launcher(needs.nodes)  # it raises its own limit as far as it may
    if needs.nodes > 1 and limits.open_files_hard is not None and limits.open_files_hard < files:
        few = f"{limits.open_files_hard:,} open files a process at most"
        message = f"{few}, a launcher of {needs.nodes:,} hosts may need {files:,}"
        hint = f"raise the hard limit to {files:,} (limits.conf)"
        yield error("launcher-files-short", "limits", message, hint)
    threads = needs.ranks * (THREADS_OF_A_RANK + (needs.threads or 1))
    for count in (limits.processes, limits.group_processes):
        if count is not None and count < threads:
            message = f"{count:,} processes and threads are allowed, the ranks may need {threads:,}"
            yield error("processes-short", "limits", message, f"ulimit -u {threads}")
