"""What the stages of a pipeline hand each other, and which parameters several of them hold.

Virtual stages stand in a row (stages.py). Between neighbours each micro batch sends the tensors
that `OperatorTable.boundary` names, forward, and their gradients, backward; of a tensor before
which nothing is trained there is no gradient, and none is sent. Under sequence parallelism a tensor
is the rank's part of the sequence, in 2d, 2.5d and 3d its part of samples and hidden states. A
parameter that several stages hold (a tied word table, a bias that all layers of a stack add) has a
gradient on each, and their sum is taken once a step.

By hand, GPT on 2 stages, m micro batches: stage 0 sends m hidden states, stage 1 m gradients; both
sum the word table. On 2 stages of 2 chunks there are 3 boundaries: stage 0 sends 2m hidden states
and m gradients, stage 1 m and 2m.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from mpctl.estimate.communication import message_bytes
from mpctl.estimate.message import Message
from mpctl.layout.job_layout import JobLayout
from mpctl.operators.grad_flow import frozen_by
from mpctl.operators.matmul import ParameterSpec
from mpctl.pipeline.schedule.orders import StageChunk


@dataclass(frozen=True, slots=True)
class P2PTransfer:
    """What one chunk sends to the next for one micro batch.

    sizes: bytes of each tensor that arrives. messages: how they get there. is_forward: activations,
    not gradients.
    """

    sender: StageChunk
    receiver: StageChunk
    sizes: tuple[int, ...]
    messages: tuple[Message, ...]
    is_forward: bool = True


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A trained parameter that several stages hold."""

    weight: ParameterSpec
    stages: tuple[int, ...]


def transfers(layout: JobLayout, *, scatters: bool = False) -> Iterator[P2PTransfer]:
    """Transfers of one micro batch at every boundary of virtual stages: activations, then
    gradients. scatters: the runtime sends a part of a whole tensor from each tp rank."""
    parallel = layout.job.parallel
    virtual = [
        (StageChunk(stage, chunk), span)
        for chunk, row in enumerate(zip(*layout.stages, strict=True))
        for stage, span in enumerate(row)
    ]
    split = parallel.tp if parallel.sequence_parallel else 1
    is_whole = split == 1 and parallel.tensor_mode == "1d"
    parts = parallel.tp if scatters and is_whole else 1
    for (before, (_, layer)), (behind, _) in pairwise(virtual):
        sizes, needs = _handed_on(layout, before.stage, layer)
        backward = tuple(size for size, is_trained in zip(sizes, needs, strict=True) if is_trained)
        yield _transfer(before, behind, tuple(sizes), parts, is_forward=True)
        yield _transfer(behind, before, backward, parts, is_forward=False)


def _handed_on(layout: JobLayout, stage: int, layer: int) -> tuple[list[int], tuple[bool, ...]]:
    """Bytes of the tensors that a stage hands on, and whether each has a gradient.

    layer: the first one of the next stage. Where the loss lies on a stage behind the head's, logits
    go there, as float32 from a stage that only casts them; behind the loss nothing does.
    """
    parallel, table = layout.job.parallel, layout.table
    if stage < layout.head_stage or parallel.vpp > 1:
        split = parallel.tp if parallel.sequence_parallel else 1
        sizes = [message_bytes(layout, dims) // split for dims in table.boundary(layer)]
        return sizes, table.boundary_needs(layer)
    if stage >= layout.loss_stage:
        return [], ()
    casts = 1 if stage == layout.head_stage else 2
    words = layout.model.vocab // parallel.tp
    return [message_bytes(layout, ("batch", "seq")) * words * casts], (True,)


def _transfer(
    sender: StageChunk,
    receiver: StageChunk,
    sizes: tuple[int, ...],
    parts: int,
    *,
    is_forward: bool,
) -> P2PTransfer:
    """The tensors from sender to receiver; in `parts` parts, which the receivers gather."""
    ends = (sender.stage, receiver.stage)
    messages = [
        Message("pp", "send", "stages", size // parts, 1, "transfer", "stage", stages=ends)
        for size in sizes
    ]
    if parts > 1:
        messages += [
            Message("tp", "all_gather", "stages", size, 1, "transfer", "stage") for size in sizes
        ]
    return P2PTransfer(sender, receiver, sizes, tuple(messages), is_forward)


def stage_transfers(layout: JobLayout, *, scatters: bool) -> list[list[Message]]:
    """By stage, what it sends to other stages and gathers of what it receives, in one micro
    batch."""
    messages: list[list[Message]] = [[] for _ in layout.stages]
    for transfer in transfers(layout, scatters=scatters):
        for message in transfer.messages:
            end = transfer.sender if message.kind == "send" else transfer.receiver
            messages[end.stage].append(message)
    for own in messages:
        own.sort(key=lambda message: (message.axis, message.bytes))
    return messages


def shared_parameters(layout: JobLayout) -> list[SharedParameter]:
    """Trained parameters that several stages hold, in the order in which the stages have them."""
    is_frozen = frozen_by(layout.table.freeze)
    trained = {n: held for n, held in layout.shared_parameters.items() if not is_frozen(n)}
    weights = {
        weight.name: weight
        for stage in {held[0] for held in trained.values()}
        for part in layout.stage_slices(stage)
        for weight in part.end_weights()
    }
    return [SharedParameter(weights[name], held) for name, held in trained.items()]
