"""Seconds of states in host memory: what crosses the link between a GPU and its host, and the host's update.

Offloaded states (ZeRO-Offload, arXiv 2101.06840), all or `training.offload_fraction` of them: once a step a rank's
share of the gradients goes down, the host updates masters and moments, and parameters go up; gradients go down beside
the last backward as other messages overlap with it. Offloaded parameters (arXiv 2104.07857): a chunk's share goes up
once in each forward and once in each backward, beside ZeRO's messages. Paged states that do not fit beside the peak
cross the link twice a step. Ranks of a node share its memory's bandwidth; each has a link.

Megatron's HybridDeviceOptimizer updates by torch's AdamW, whose kernels pass over every tensor one after another and
whose temporaries are new pages: a rank takes `host.update` seconds an element however few ranks a node has, and no
less than a stated memory does. All of it is inside the optimizer's step: gradients go down after backward.

By hand, 1e9 bf16 parameters on a GPU with PCIe 4, float32 gradients: 4e9 / 27.8e9 = 0.14 s down, 30e9 / 117e9 =
0.26 s of update, 2e9 / 27.8e9 = 0.07 s up.
"""

from __future__ import annotations

from math import inf

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.communication import gradient_bytes
from mpctl.plan.estimate.optimizers import layout_states
from mpctl.spec.runtime import RuntimeProfile

PCIE_4, REACHED = 32e9, 0.87
"""bytes/s of 16 lanes; the share that copies reach: 55.6 of PCIe 5's 64 GB/s in NVIDIA's post on NVbandwidth."""
HOST_UPDATE = 10e9 * 30 / 2.57  # arXiv 2101.06840, table 4: CPU-Adam on a DGX-2, 30 bytes a parameter


def link_seconds(layout: JobLayout, size: float) -> float:
    """Return the seconds in which so many bytes cross a GPU's link to its host."""
    device = layout.job.cluster.device
    return size / (REACHED * ((device.host_link if device else None) or PCIE_4))


def gradients_down(layout: JobLayout, profile: RuntimeProfile, elements: float) -> float:
    """Return the seconds in which the gradients of so many elements go to the host."""
    return link_seconds(layout, elements * gradient_bytes(layout.job.training, profile))


def update_and_return(layout: JobLayout, elements: float) -> float:
    """Return the seconds in which the host updates so many elements and sends parameters back, unless these
    stay there until they are used."""
    return sum(_update_and_return(layout, elements))


def overlapped_update(layout: JobLayout, down: float, elements: float) -> float:
    """Return the seconds of an update whose tensors come and go while the host updates others
    (training.offload_overlap): the longer of the copies, of which those down take `down`, and of the update."""
    update, back = _update_and_return(layout, elements)
    return max(down + back, update)


def _update_and_return(layout: JobLayout, elements: float) -> tuple[float, float]:
    job, states = layout.job, layout_states(layout)
    ranks = min(job.cluster.gpus_per_node or job.world_size, job.world_size)
    moved = elements * (4 * states.rule.reads + states.moved)
    back = 0.0 if job.training.offload_parameters else elements * job.training.value_bytes
    own = elements * layout.profile.host.update
    bandwidth = job.cluster.host_bandwidth or (inf if own else HOST_UPDATE)
    return max(own, moved * ranks / bandwidth), link_seconds(layout, back)
