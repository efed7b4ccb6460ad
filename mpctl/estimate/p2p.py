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

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from mpctl.estimate.communication import message_bytes
from mpctl.layout.job_layout import JobLayout
from mpctl.operators.grad_flow import frozen_by
from mpctl.operators.matmul import ParameterSpec
from mpctl.pipeline.schedule.orders import StageChunk


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


def hand_overs(layout: JobLayout) -> Iterator[P2PTransfer]:
    """Transfers of one micro batch at every boundary of virtual stages: activations, then
    gradients."""
    table, parallel = layout.table, layout.job.parallel
    virtual = [
        (StageChunk(stage, chunk), span)
        for chunk, row in enumerate(zip(*layout.stages, strict=True))
        for stage, span in enumerate(row)
    ]
    split = parallel.tp if parallel.sequence_parallel else 1
    for (before, (_, layer)), (behind, _) in pairwise(virtual):
        sizes = [message_bytes(layout, dims) // split for dims in table.boundary(layer)]
        trained = zip(sizes, table.boundary_needs(layer), strict=True)
        yield P2PTransfer(before, behind, tuple(sizes))
        yield P2PTransfer(
            behind, before, tuple(size for size, is_trained in trained if is_trained), False
        )


def shared_parameters(layout: JobLayout) -> list[SharedParameter]:
    """Trained parameters that several stages hold, in the order in which the stages have them."""
    is_frozen, stages = frozen_by(layout.table.freeze), layout.shared_parameters
    weights: dict[str, ParameterSpec] = {}
    for stage in range(len(layout.stages) if stages else 0):
        for part in layout.stage_slices(stage):
            weights |= {w.name: w for w in part.end_weights() if w.name in stages}
    return [
        SharedParameter(weights[name], held) for name, held in stages.items() if not is_frozen(name)
    ]
