"""Sizes and bytes that messages, memory and time are counted from.

Sizes are of one micro batch. `batch_sizes` are those of its tensors before tp splits them;
`local_sizes` are this rank's part of them between the layers, which a grid of tensor-parallel ranks
cuts along samples and hidden states (tensor_grid.py); in 1d both are equal. Phi is the volume of
one phase (a reduce-scatter or an all-gather) of an all-reduce of the full hidden states, micro
batch x seq x hidden x bytes, the unit in which plans count volumes.

By hand, 8 samples of 1024 positions, hidden 512, fp32: phi is 16 MiB, and on a square of 2 x 2 a
rank has 4 samples of hidden 256, 4 MiB of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import pairwise
from math import prod
from typing import Literal, NamedTuple

from mpctl.core.collectives import Kind
from mpctl.core.units import DTYPE_BYTES
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.flops import sequence_sizes
from mpctl.model.operators.grad_flow import GradFlow
from mpctl.model.operators.layer import LayerStack
from mpctl.model.operators.matmul import Dims, ParameterSpec
from mpctl.model.pipeline.placement import StageChunk
from mpctl.plan.estimate.routing import expert_load
from mpctl.spec.runtime import RuntimeProfile
from mpctl.spec.training import TrainingSpec

Sizes = Mapping[str, int]


def batch_sizes(layout: JobLayout) -> Sizes:
    """Elements of one micro batch on one rank of cp, by dimension, before tp splits them."""
    job, model = layout.job, layout.model
    batch = job.training.micro_batch_size
    sizes = sequence_sizes(model, batch=batch, cp=job.parallel.cp)
    sizes["hidden"] = model.hidden
    return sizes


def local_sizes(layout: JobLayout) -> Sizes:
    """Elements of one micro batch on one rank between the layers, by dimension: `batch_sizes` with
    samples and hidden states cut by the grid of tp. Sequence parallelism is the caller's, but for
    `routed`, the rows that the experts of the fullest rank compute (routing.py)."""
    sizes, grid = dict(batch_sizes(layout)), layout.grid
    sizes["batch"] //= grid.sample_parts
    sizes["hidden"] //= grid.hidden_parts
    if "routed" in sizes:
        sizes["routed"] = expert_load(layout).rows
    return sizes


def gradient_bytes(training: TrainingSpec, profile: RuntimeProfile) -> int:
    """Bytes of a gradient's element where it is accumulated and reduced: the job's choice, else the
    runtime's, in no fewer bytes than the parameter."""
    if training.gradient_dtype is not None:
        return DTYPE_BYTES[training.gradient_dtype]
    return max(training.value_bytes, DTYPE_BYTES[profile.gradient_dtype or training.dtype])


def message_bytes(layout: JobLayout, dims: Dims) -> int:
    """Bytes of a tensor of these dimensions between the layers, in the training dtype, on one rank
    of tp."""
    sizes = local_sizes(layout)
    return prod(sizes[dim] for dim in dims) * layout.job.training.value_bytes


def phi_bytes(layout: JobLayout, stack: LayerStack) -> int:
    """Bytes of one phase of one all-reduce of the stack's hidden states, not split over tp."""
    sizes = batch_sizes(layout)
    elements = sizes["batch"] * sizes[stack.seq] * sizes["hidden"]
    return elements * layout.job.training.value_bytes


def local_parameters(
    layout: JobLayout, stage: int, *, trained_only: bool = False, whole_only: bool = False, view: str = ""
) -> int:
    """Number of parameters that one rank of a stage holds, before ZeRO shares them.

    trained_only: leave frozen parameters out. whole_only: only those that are not split. view: only
    those of this view; of all views where it is empty.
    """

    def count(weights: Iterable[ParameterSpec]) -> int:
        own = (w for w in weights if view in ("", w.view) and not (whole_only and w.is_split))
        return sum(weight.local_numel(layout.views) for weight in own)

    def of_layer(flow: GradFlow) -> int:
        if id(flow) not in known:
            known[id(flow)] = count(flow.trained if trained_only else flow.part.weights)
        return known[id(flow)]

    def count_all() -> int:
        slices = layout.stage_slices(stage)
        ends = {w.name: w for part in slices for w in part.end_weights(trained_only=trained_only)}
        blocks = sum([layers * of_layer(flow) for part in slices for layers, flow in part.blocks])
        return blocks + count(ends.values())

    grids = tuple((name, held.grid) for name, held in layout.views.items())
    known: dict[Hashable, int] = layout.table.once(("numel", grids, trained_only, whole_only, view), dict)
    alike = layout.stage_classes[stage]
    if alike not in known:
        known[alike] = count_all()
    return known[alike]


# ------------------------------------------------------------------------------
# One message of a training step as a value, and equal messages counted together.
#
# A `Message` has everything that determines its bytes and its seconds: the group that it goes over,
# the kind of collective, its bytes, when in a step it is sent and which computation may hide it.
# The lists of messages are made in layer_messages.py (tp and cp), messages.py (between stages) and
# gradient_messages.py (replicas), and put together in messages.py; bytes and seconds are both
# computed from these lists, so that no message can have one without the other.


Phase = Literal["forward", "backward", "recompute", "transfer", "step"]
Cover = Literal["weight_gradient", "product", "layer", "last_backward", "last_layers", "stage"]


class Message(NamedTuple):
    """`count` equal messages that one rank takes part in.

    axis: the group, by its name in plans: tp, cp, pp, dp_cp (the replicas), world, or a group of
    the grid that tp is in 2d, 2.5d and 3d (row, col, row-depth, input, ..). kind: the collective
    (mpctl/core/collectives.py). what: a description of the tensor. bytes: size of the full message,
    before a collective divides it over its ranks. phase: when it is sent: in every micro batch's
    forward, backward or repeated forward (recompute), between two stages (transfer), or once a
    step. cover: the computation that may hide it: the weight gradient of the product that sends it,
    the product itself, which is computed in `count` steps and overlaps each with the message that
    the next one needs or the previous one left; the layer's own pass, the last backward of the
    stage, with it as each layer's messages are (last_layers), or the work of the stages that
    exchange it; None where nothing hides it. product: the
    matrix product that sends it, else empty. stages: the pipeline stages that take part, if not all
    of them. outer: of an all-to-all, the bytes that leave a domain over those for the ranks
    elsewhere: below 1 where what several of them get is sent once (expert_messages.py).
    """

    axis: str
    kind: Kind
    what: str
    bytes: int
    count: int = 1  # type: ignore[assignment]  # which hides tuple.count
    phase: Phase = "step"
    cover: Cover | None = None
    product: str = ""
    stages: tuple[int, ...] = ()
    outer: float = 1.0

    def times(self, count: int) -> Message:
        """The message `count` times as often."""
        if count == 1:
            return self
        return Message(
            self.axis,
            self.kind,
            self.what,
            self.bytes,
            self.count * count,
            self.phase,
            self.cover,
            self.product,
            self.stages,
            self.outer,
        )


class MessageCount(NamedTuple):
    """Number of messages of one kind and size in a step, over all phases; fields as in Message."""

    axis: str
    kind: Kind
    what: str
    bytes: int
    count: int  # type: ignore[assignment]  # as a Message's


def count_messages(messages: Iterable[Message]) -> Iterator[MessageCount]:
    """Equal messages counted together, in the order in which they first appear."""
    counts: Counter[tuple[str, Kind, str, int]] = Counter()
    for message in messages:
        counts[message.axis, message.kind, message.what, message.bytes] += message.count
    return (MessageCount(*key, count) for key, count in counts.items() if count)


# ------------------------------------------------------------------------------
# What the stages of a pipeline send each other, and which parameters several of them hold.
#
# Virtual stages form a chain (stages.py). Between neighbours each micro batch sends the tensors
# that `OperatorTable.boundary` names, forward, and their gradients, backward; where nothing before
# a tensor is trained, its gradient is neither computed nor sent. Under sequence parallelism a
# tensor is the rank's part of the sequence, in 2d, 2.5d and 3d its part of samples and hidden
# states. A parameter that several stages hold (a tied word table, a bias that all layers of a stack
# add) has a gradient on each, and their sum is taken once a step.
#
# By hand, GPT on 2 stages, m micro batches: stage 0 sends m hidden states, stage 1 m gradients;
# both sum the word table. On 2 stages of 2 chunks there are 3 boundaries: stage 0 sends 2m hidden
# states and m gradients, stage 1 m and 2m.


class P2PTransfer(NamedTuple):
    """The tensors that one chunk sends to the next for one micro batch.

    sizes: bytes of each tensor that arrives. messages: how they get there. is_forward: activations,
    not gradients.
    """

    sender: StageChunk
    receiver: StageChunk
    sizes: tuple[int, ...]
    messages: tuple[Message, ...]
    is_forward: bool = True


class SharedParameter(NamedTuple):
    """A trained parameter that several stages hold."""

    weight: ParameterSpec
    stages: tuple[int, ...]


def transfers(layout: JobLayout, *, scatters: bool = False) -> Iterator[P2PTransfer]:
    """Transfers of one micro batch at every boundary of virtual stages: activations, then
    gradients. scatters: each tp rank sends one part of the tensor instead of all of it."""
    parallel = layout.job.parallel
    placement = layout.placement
    virtual = [*map(placement.place, range(placement.stages * placement.chunks))]
    split = parallel.tp if parallel.sequence_parallel else 1
    is_unsharded = split == 1 and parallel.tensor_mode == "1d"
    parts = parallel.tp if scatters and is_unsharded else 1
    elements = local_sizes(layout)
    for before, behind in pairwise(virtual):
        sizes, needs = _handed_on(layout, elements, before)
        if before.stage == behind.stage:  # the turn of a V, where nothing is sent
            sizes, needs = [], ()
        backward = tuple(size for size, is_trained in zip(sizes, needs, strict=True) if is_trained)
        yield _transfer(before, behind, tuple(sizes), parts, is_forward=True)
        yield _transfer(behind, before, backward, parts, is_forward=False)


def _handed_on(layout: JobLayout, elements: Sizes, place: StageChunk) -> tuple[list[int], tuple[bool, ...]]:
    """Bytes of the tensors that a chunk sends to the next, and whether each has a gradient.

    elements: `local_sizes`. Where the loss is on a stage after
    the head's, logits go there, as float32 from a stage that only casts them; after the loss nothing is
    sent.
    """
    parallel, stage = layout.job.parallel, place.stage
    if stage < layout.head_stage or parallel.vpp > 1:
        split = parallel.tp if parallel.sequence_parallel else 1
        width = layout.job.training.value_bytes
        border = layout.border(*place, after=True)
        return [prod([elements[dim] for dim in dims]) * width // split for dims in border.dims], border.needs
    if stage >= layout.loss_stage:
        return [], ()
    casts = 1 if stage == layout.head_stage else 2
    words = layout.model.vocab // parallel.tp
    return [message_bytes(layout, ("batch", "seq")) * words * casts], (True,)


def _transfer(
    sender: StageChunk, receiver: StageChunk, sizes: tuple[int, ...], parts: int, *, is_forward: bool
) -> P2PTransfer:
    """The tensors from sender to receiver; in `parts` parts, which the receivers gather."""
    ends = (sender.stage, receiver.stage)
    messages = [Message("pp", "send", "stages", size // parts, 1, "transfer", "stage", stages=ends) for size in sizes]
    if parts > 1:
        messages += [Message("tp", "all_gather", "stages", size, 1, "transfer", "stage") for size in sizes]
    return P2PTransfer(sender, receiver, sizes, tuple(messages), is_forward)


def stage_transfers(layout: JobLayout, *, scatters: bool) -> list[list[Message]]:
    """Return each stage's messages to other stages and gathers of what it receives, for one micro batch."""
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
    is_frozen = layout.table.is_frozen
    trained = {n: held for n, held in layout.shared_parameters.items() if not is_frozen(n)}
    weights = {
        weight.name: weight
        for stage in {held[0] for held in trained.values()}
        for part in layout.stage_slices(stage)
        for weight in part.end_weights()
    }
    return [SharedParameter(weights[name], held) for name, held in trained.items()]
