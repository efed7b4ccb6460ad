"""Every message that a rank takes part in during one validation, in bytes of whole messages.

A validation is forward passes only: the messages of a step's forward (messages.py), one gathering
of each bucket of parameters at ZeRO 3, and one status a corpus. Which samples a replica computes,
and in how many micro batches, is `sharding.validation_batches`; a micro batch that counts for
nothing is one sample.

By hand, 5 samples, dp 2, micro batches of 2: replica 0 computes 2 and 1 samples, replica 1 computes
2 and one that does not count; at ZeRO 3 both gather each bucket twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from mpctl.estimate.messages import Message, forward_bucket, pass_messages, sent, status_message
from mpctl.estimate.p2p import hand_overs
from mpctl.layout.job_layout import JobLayout
from mpctl.sharding import validation_sizes


def validation_messages(
    layout: JobLayout, *, stage: int, replica: int, samples: Sequence[int]
) -> tuple[Message, ...]:
    """The messages of one validation, of one rank of pipeline stage `stage`.

    replica: its data-parallel replica. samples: number of validation samples of each corpus.
    """
    sizes = Counter[int]()
    for corpus in samples:
        sizes.update(_batch_sizes(layout, replica, corpus))
    forwards = (
        _forwards(layout.with_micro_batch_size(size), stage, count)
        for size, count in sorted(sizes.items())
    )
    parameters = (
        replace(message, count=message.count * sizes.total())
        for bucket in layout.buckets(stage)
        for message in forward_bucket(layout, bucket)
    )
    status = replace(status_message(layout.job), count=len(samples))
    return tuple(sent(layout, chain(*forwards, parameters, [status])))


def _batch_sizes(layout: JobLayout, replica: int, samples: int) -> dict[int, int]:
    """How many micro batches of each size a replica computes, by the size in samples."""
    job = layout.job
    return validation_sizes(
        samples, micro_batch=job.training.micro_batch_size, parts=job.sizes["dp"], index=replica
    )


def _forwards(layout: JobLayout, stage: int, count: int) -> Iterator[Message]:
    """Forward messages of `count` micro batches on a stage, without those of parameters."""
    for part in layout.stage_slices(stage):
        for message in pass_messages(layout, part, forward_only=True):
            yield replace(message, count=message.count * count)
    for hand_over in hand_overs(layout):
        if hand_over.is_forward and hand_over.sender.stage == stage:
            for size in hand_over.sizes:
                yield Message("pp", "send", "stages", size, count)
