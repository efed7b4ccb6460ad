"""Memory that the device's libraries hold for a rank: workspaces of matrix products, and communicators.

cuBLAS works in a block of memory that torch allocates like a tensor, so that it counts as
allocated, one for each handle and stream. Handles are a thread's, and backward runs in a thread of
its own, hence two. Sizes are torch's (aten/src/ATen/cuda/CublasHandlePool.cpp): 32 MiB on Hopper,
:4096:2:16:8 on other NVIDIA GPUs, 128 MiB on gfx94 and gfx95 and 32 MiB on other AMD GPUs, whose
hipBLASLt takes 76 MiB more. CUBLAS_WORKSPACE_CONFIG is not read, even where the user sets it.

An NCCL communicator has, for each channel and each peer that it receives from, one buffer for each
protocol (src/init.cc, computeBuffSizes): Simple 4 MiB (NCCL_BUFFSIZE), LL 512 x 8 x 8 x 16 bytes,
LL128 640 x 120 x 8 x 8 bytes: 9.2 MiB. In a ring a rank receives from one peer; an all-reduce also
takes trees, which within a node run along the ring and back: two, of two ranks one. An algorithm is
connected when it is first used (NCCL_RUNTIME_CONNECT), so that the group of all stages, whose
messages go over links, holds nothing. Channels as NCCL_DEBUG=INFO prints them: 24 within a node of
H100 or A100 with a switch, and 2 for each card, that is each rank of the group on a node, where the
group spans nodes.

By hand, 8 ranks on one node that all-reduce: 24 x 2 x 9,633,792 = 462 MB; sequence parallel 231 MB.
A rank that receives from two neighbours over links of 4 channels: 2 x 4 x 9,633,792 = 77 MB.

The further buffers of NVLink SHARP and of all-to-alls are not counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from mpctl.core.axes import DEFAULT_ORDER
from mpctl.model.layout.groups import LINK_CHANNELS, device_groups
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.layout.link_levels import topology_levels

WORKSPACES = {"cuda": 8_519_680, "rocm": (32 + 76) * 2**20}
"""Bytes of a workspace by kind of device, unless the device states its own."""
HOPPER_WORKSPACE = 32 * 2**20


def workspace_bytes(layout: JobLayout) -> int:
    """Bytes of all workspaces of a rank; 0 on a CPU, and under software whose reserve was fitted to
    peaks that contain them. Where the device is not known, as on Hopper."""
    kind, device = layout.job.device_kind, layout.job.cluster.device
    if device is not None and device.blas_workspace:
        each = device.blas_workspace
    elif device is None and kind == "cuda":
        each = HOPPER_WORKSPACE
    else:
        each = WORKSPACES.get(kind or "", 0)
    return 0 if kind == "cpu" else layout.profile.memory.workspaces * each


class Communicators:
    """The communicators of the ranks of a layout, and what they hold. Ranks are taken to be placed
    in the default order of axes, since memory is to follow from the sizes alone."""

    def __init__(self, layout: JobLayout) -> None:
        self.layout, self.costs = layout, layout.profile.memory.communicators
        self.every_rank = 0.0
        if layout.job.device_kind in (None, "cpu") or layout.job.world_size == 1:
            self.costs = None
        if self.costs is not None:
            parallel = layout.job.parallel.model_copy(update={"order": DEFAULT_ORDER})
            job = layout.job.model_copy(update={"parallel": parallel})
            self.topology = replace(layout, job=job).topology
            self.domain = topology_levels(job.cluster, self.topology)[0].ranks
            groups = device_groups(self.topology, layout.views).items()
            self.every_rank = sum(self._held(name, ranks) for name, ranks in groups)

    def of_stage(self, layout: JobLayout, stage: int) -> int:
        """Bytes of a rank of a pipeline stage, with those of its links and tied parameters. layout:
        one with the same groups."""
        if self.costs is None:
            return 0
        total = self.every_rank
        if layout.last_stage:
            has_two = len(layout.stages[stage]) > 1 or 0 < stage < layout.last_stage
            links = 2 if has_two else 1
            if layout.placement.is_v:  # each neighbour sends activations and gradients
                links = 2 if stage in (0, layout.last_stage) else 4
            total += links * LINK_CHANNELS * self.costs.connection_bytes
        stride = self.topology.strides["pp"]
        for stages in {s for s in layout.shared_parameters.values() if stage in s}:
            if len(stages) <= layout.last_stage:  # else they are the group of all stages
                total += self._held("tied", range(0, len(stages) * stride, stride))
        return round(total)

    def _held(self, name: str, ranks: Sequence[int]) -> float:
        """Bytes of the communicator of these ranks, of which rank 0 is the first."""
        assert self.costs is not None
        if name == "pp":
            return 0.0
        channels = self.costs.channels
        if ranks[-1] >= self.domain:
            cards = bisect_left(ranks, self.topology.gpus_per_node)
            channels = min(channels, self.costs.channels_a_card * cards)
        peers = 1 if name in self._in_rings else min(2, len(ranks) - 1)
        return peers * channels * self.costs.connection_bytes

    @cached_property
    def _in_rings(self) -> set[str]:
        """The groups that only gather and scatter, or broadcast."""
        layout = self.layout
        names = {"cp", *layout.grid.groups}
        if layout.job.parallel.sequence_parallel:
            names.add("tp")
        return names | {view.zero_group for view in layout.views.values() if view.zero}
