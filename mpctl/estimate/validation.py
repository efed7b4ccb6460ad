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

from mpctl.estimate.communication import held_by
from mpctl.estimate.messages import Message, forward_bucket, pass_messages, sent, status_message
from mpctl.estimate.p2p import Stages, hand_overs
from mpctl.layout.buckets import shared_names, stage_buckets
from mpctl.operators.table import OperatorTable
from mpctl.sharding import validation_sizes
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec


def validation_messages(
    job: JobSpec,
    model: ModelSpec,
    table: OperatorTable,
    stages: Stages,
    *,
    stage: int,
    replica: int,
    samples: Sequence[int],
) -> tuple[Message, ...]:
    """The messages of one validation of a rank of pipeline stage `stage`.

    replica: its data-parallel replica. samples: number of validation samples of each corpus.
    """
    sizes = Counter[int]()
    for corpus in samples:
        sizes.update(_batch_sizes(job, replica, corpus))
    buckets = stage_buckets(
        job, table, stages[stage], stage=stage, shared=shared_names(table, stages)
    )
    forwards = (
        _forwards(job, model, table, stages, stage=stage, batch=size, count=count)
        for size, count in sorted(sizes.items())
    )
    parameters = (
        replace(message, count=message.count * sizes.total())
        for bucket in buckets for message in forward_bucket(job, bucket)
    )  # fmt: skip
    status = replace(status_message(job), count=len(samples))
    return tuple(sent(job, chain(*forwards, parameters, [status])))


def _batch_sizes(job: JobSpec, replica: int, samples: int) -> dict[int, int]:
    return validation_sizes(
        samples, micro_batch=job.training.micro_batch_size, parts=job.sizes["dp"], index=replica
    )


def _forwards(
    job: JobSpec, model: ModelSpec, table: OperatorTable, stages: Stages, *, stage: int, batch: int,
    count: int,
) -> Iterator[Message]:  # fmt: skip
    """Forward messages of `count` micro batches of `batch` samples; none of parameters."""
    training = job.training.model_copy(update={"micro_batch_size": batch})
    own = job.model_copy(update={"training": training})
    for held in held_by(own, table, stages[stage], stage=stage):
        for message in pass_messages(own, model, held, forward_only=True):
            yield replace(message, count=message.count * count)
    for hand_over in hand_overs(own, model, table, stages):
        if hand_over.is_forward and hand_over.sender.stage == stage:
            for size in hand_over.sizes:
                yield Message("pp", "send", "stages", size, count)
