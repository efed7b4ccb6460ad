"""What a job needs of every host, or of the hosts of a launch whose job is not known yet."""

from __future__ import annotations

from dataclasses import dataclass

from mpctl.estimate.checkpoint import most_at_once
from mpctl.hosts.checks import Device
from mpctl.planning.plan import Plan
from mpctl.topology import Topology


@dataclass(frozen=True, slots=True)
class Needs:
    """device: where ranks run, None where no job says so. nodes: hosts; ranks: on each host.
    memory_bytes: of the ranks of the fullest host on CPU, gpu_bytes: of the fullest rank on its
    GPU, at the peak of a step; 0 where it is not known. disk_bytes: of all checkpoints at once.
    threads: of each rank, None where mpctl chooses. spans_tp: whether tp groups have several ranks.
    """

    device: Device | None = None
    nodes: int = 1
    ranks: int = 1
    memory_bytes: int = 0
    gpu_bytes: int = 0
    disk_bytes: int = 0
    threads: int | None = None
    spans_tp: bool = False

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.ranks


def needs_of(plan: Plan, device: Device, *, one_host: bool) -> Needs:
    """What a legal plan needs. one_host: whether all ranks run on one host, whatever nodes the plan
    has (`--on local`)."""
    job, topology = plan.job, plan.require_legal()
    nodes = 1 if one_host else job.cluster.nodes
    memory = gpu = disk = 0
    if plan.estimate is not None:
        peaks = [stage.allocated_bytes for stage in plan.estimate.memory]
        if device == "cpu":
            per_node = _fullest_node(topology, peaks)
            memory = sum(peaks) * job.world_size // len(peaks) if one_host else per_node
        else:
            gpu = max(peaks)
        disk = most_at_once(job.checkpoint, job.training.steps) * plan.estimate.checkpoint_bytes
    return Needs(
        device=device,
        nodes=nodes,
        ranks=job.world_size // nodes,
        memory_bytes=memory,
        gpu_bytes=gpu,
        disk_bytes=disk,
        threads=job.launch.threads_per_rank,
        spans_tp=job.parallel.tp > 1,
    )


def _fullest_node(topology: Topology, peaks: list[int]) -> int:
    """The most bytes that the ranks of one node take. peaks: of a rank, by pipeline stage.

    Nodes differ by the stages that their ranks are in. One node of each stage's first rank is
    looked at: in every order of axes the fullest node has its like among them or is an equal mix.
    """
    size, step = topology.gpus_per_node, topology.strides["pp"]
    firsts = {topology.node(stage * step) for stage in range(len(peaks))}
    sums = [
        sum(peaks[topology.coords(rank)["pp"]] for rank in _ranks(topology, node, size))
        for node in firsts
    ]
    return max(sums)


def _ranks(topology: Topology, node: int, size: int) -> range:
    return range(node * size, min((node + 1) * size, topology.world_size))
