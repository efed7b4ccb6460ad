"""What the stages of a pipeline hand each other, and which parameters several of them hold.

Virtual stages stand in a row (stages.py). Between neighbours each micro batch sends the tensors
that `OperatorTable.boundary` names, forward, and their gradients, backward; of a tensor before
which nothing is trained there is no gradient, and none is sent. Under sequence parallelism a tensor
is the rank's part of the sequence. A parameter that several stages hold (a tied word table, a bias
that all layers of a stack add) has a gradient on each, and their sum is taken once a step.

By hand, GPT on 2 stages, m micro batches: stage 0 sends m hidden states, stage 1 m gradients; both
sum the word table. On 2 stages of 2 chunks there are 3 boundaries: stage 0 sends 2m hidden states
and m gradients, stage 1 m and 2m.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mpctl.estimate.communication import held_by, message_bytes
from mpctl.operators.matmul import ParameterSpec
from mpctl.operators.table import OperatorTable
from mpctl.pipeline.schedule.orders import StageChunk
from mpctl.pipeline.stages import Span
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec

Stages = Sequence[Sequence[Span]]  # [stage][chunk]


@dataclass(frozen=True, slots=True)
class P2PTransfer:
    """What goes from one chunk to the next for one micro batch: bytes of each tensor."""

    sender: StageChunk
    receiver: StageChunk
    sizes: tuple[int, ...]
    is_forward: bool = True


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A trained parameter that several stages hold."""

    weight: ParameterSpec
    stages: tuple[int, ...]


def hand_overs(
    job: JobSpec, model: ModelSpec, table: OperatorTable, stages: Stages
) -> Iterator[P2PTransfer]:
    """Of one micro batch, at every boundary of virtual stages: activations, then gradients."""
    virtual = [
        (StageChunk(stage, chunk), span)
        for chunk, row in enumerate(zip(*stages, strict=True))
        for stage, span in enumerate(row)
    ]
    split = job.parallel.tp if job.parallel.sequence_parallel else 1
    for (before, (_, layer)), (behind, _) in pairwise(virtual):
        sizes = [message_bytes(job, model, dims) // split for dims in table.boundary(layer)]
        trained = zip(sizes, table.boundary_needs(layer), strict=True)
        yield P2PTransfer(before, behind, tuple(sizes))
        yield P2PTransfer(
            behind, before, tuple(size for size, is_trained in trained if is_trained), False
        )


def shared_parameters(job: JobSpec, table: OperatorTable, stages: Stages) -> list[SharedParameter]:
    """In the order in which the stages meet them; layers' own parameters are never shared."""
    weights: dict[str, ParameterSpec] = {}
    holders: dict[str, list[int]] = {}
    for stage, spans in enumerate(stages):
        held = held_by(job, table, spans, stage=stage)
        own = {w.name: w for part in held for w in part.end_weights(trained_only=True)}
        weights |= own
        for name in own:
            holders.setdefault(name, []).append(stage)
    return [SharedParameter(weights[name], tuple(s)) for name, s in holders.items() if len(s) > 1]
