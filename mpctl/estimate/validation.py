"""Every message that a rank takes part in during one validation, in bytes of whole messages.

A validation is forward passes only: the messages of a step's forward (messages.py), one gathering
of each bucket of parameters at ZeRO 3, and one status a corpus. Which samples a replica computes,
and in how many micro batches, is `sharding.validation_batches`; a micro batch that counts for
nothing is one sample, filled up where tensor-parallel ranks cut the samples.

By hand, 5 samples, dp 2, micro batches of 2: replica 0 computes 2 and 1 samples, replica 1 computes
2 and one that does not count; at ZeRO 3 both gather each bucket twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from mpctl.estimate.message import MessageCount, count_messages
from mpctl.estimate.messages import StepMessages, status_message
from mpctl.layout.job_layout import JobLayout
from mpctl.sharding import validation_sizes


def validation_messages(
    layout: JobLayout, *, stage: int, replica: int, samples: Sequence[int]
) -> tuple[MessageCount, ...]:
    """The messages of one validation, of one rank of pipeline stage `stage`.

    replica: its data-parallel replica. samples: number of validation samples of each corpus.
    """
    sizes = Counter[int]()
    for corpus in samples:
        sizes.update(_batch_sizes(layout, replica, corpus))
    forwards = (
        StepMessages.of(layout.with_micro_batch_size(size)).forward_of(stage, count)
        for size, count in sorted(sizes.items())
    )
    messages = StepMessages.of(layout)
    gathers = (m.times(sizes.total()) for m in messages.gradients.forward(stage))
    status = messages.sent([status_message(layout.job).times(len(samples))])
    alone = (count_messages([message]) for message in chain(gathers, status))
    return tuple(chain(*forwards, *alone))


def _batch_sizes(layout: JobLayout, replica: int, samples: int) -> dict[int, int]:
    """How many micro batches of each size a replica computes, by the size in samples."""
    job = layout.job
    return validation_sizes(
        samples,
        micro_batch=job.training.micro_batch_size,
        parts=job.sizes["dp"],
        index=replica,
        sample_parts=layout.grid.sample_parts,
    )
