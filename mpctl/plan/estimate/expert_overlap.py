"""Rows of one micro batch sent to experts while another is computed (training.moe_overlap).

Megatron's combined_1f1b.py runs the forward of one micro batch beside the backward of another, layer by layer:
a combination backward beside attention's forward, dispatches beside the experts' products, a combination forward
beside attention's backward. Hidden is a share of what the profile leaves exposed: of the messages of rows, and of
the host's waits for their numbers (`experts.overlapped`), no more than the kernels of the other direction take.
Forwards before the first backward of a stage and backwards after its last forward run alone. A stage holds one
more chunk for it; without a pipeline one more layer, as each layer's forward starts before the backward of its
partner frees it.

By hand, 8 micro batches without a pipeline: the first forward and the last backward are alone, 7 of 8 overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.pipeline.schedule.orders import warmup
from mpctl.plan.estimate.kernels import OpTimes


class Saved(Protocol):
    """Bytes of a chunk's activations until its backward."""

    @property
    def saved(self) -> float:
        """Bytes saved for backward."""


def paired_share(layout: JobLayout, stage: int) -> float:
    """The share of a stage's forwards that run beside a backward."""
    p, m, chunks = layout.job.parallel, layout.num_microbatches, len(layout.stages[stage])
    ahead = warmup(p.schedule, stage=stage, stages=p.pp, microbatches=m, chunks=chunks) if p.pp > 1 else 0
    return max(0.0, 1 - (ahead + 1) / (m * chunks))


def overlap(work: OpTimes, share: float, waits: float, drag: float) -> None:
    """Hide a share of the messages of rows, and of `waits` seconds in each direction, beside the kernels of the
    other direction, which take longer by `drag` times what is hidden."""
    ahead, back = work.ep_forward + waits, work.ep_backward + waits
    in_forward, in_backward = min(share * ahead, work.dgrad + work.wgrad), min(share * back, work.forward)
    _hide(work, in_forward / (ahead or 1), in_backward / (back or 1), waits)
    work.forward += drag * in_backward
    work.dgrad += drag * in_forward


def _hide(work: OpTimes, forward: float, backward: float, waits: float) -> None:
    """Take these shares of the messages of each direction, and of the waits among its kernels."""
    work.forward -= forward * waits
    work.dgrad -= backward * waits
    work.ep_forward *= 1 - forward
    work.ep_backward *= 1 - backward


def least(work: OpTimes, share: float, waits: float) -> OpTimes:
    """A layer's seconds where everything of this share is hidden: a lower bound of `overlap`."""
    found = OpTimes()
    found.add(work)
    _hide(found, share, share, waits)
    return found


def more_saved(layout: JobLayout, stage: int, chunks: Sequence[Saved], in_flight: int) -> float:
    """Bytes of activations that a stage holds in addition; in_flight: chunks that it holds without the overlap."""
    if in_flight >= layout.num_microbatches * len(chunks):
        return 0.0
    most = max(chunk.saved for chunk in chunks)
    return most if layout.job.parallel.pp > 1 else most / max(1, layout.table.layers)
