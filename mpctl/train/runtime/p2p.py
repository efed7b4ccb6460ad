"""Messages between the stages of a pipeline: each link has a separate communicator.

NCCL runs the messages of a communicator one after the other, in the order in which a rank started
them, and a send ends when it is received (ProcessGroupNCCL: unbatched messages of a group with a
bound device). Over one group, a receive would block the sends started after it until a neighbour
has computed the awaited tensor. So each link (the messages from one stage to another in one
direction) has a group of only these two stages: one side sends and the other receives the same
messages in the same order. gloo matches messages by their peers and needs no such groups.

NCCL also makes a message wait for the kernels queued on the current stream. A send needs that. A
receive needs only that its buffer is free: when one is started, the buffer of the next of its kind
is taken from the memory of the stream that computes, and that point of the stream is marked. The
next one waits, on a side stream, for the mark, and arrives while the stage computes what was queued
after it. So all buffers go back in the order of one stream (train/transport/streams.py), and a link has
one spare buffer for each tensor and direction, however far the host runs ahead of the device.

By hand, 1F1B: the receive for the forward of micro batch 7 is queued before that forward, and may
begin when the device has come to where the one for micro batch 6 was queued: a forward and a
backward earlier.

All ranks make the same number of groups in the same order (torch splits NCCL's communicators from
the default one, in which all ranks must take part), so links are made in rounds in which every
stage is in at most one pair.

>>> link_rounds(StagePlacement(stages=4))[:2]
[[(0, 1), (2, 3)], [(1, 2)]]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mpctl.model.pipeline.placement import StagePlacement
from mpctl.train.runtime.mesh import Mesh, pair_groups
from mpctl.train.transport.group import Group, Pending
from mpctl.train.transport.streams import HOST_STREAM, MakeStream, SideStream, StreamMark, side_stream

Direction = Literal["forward", "backward"]
Pair = tuple[int, int]
"""(sending stage, receiving stage)"""
MessageKind = tuple[Direction, int, int, tuple[int, ...]]
"""(direction, sending stage, number of the tensor at the border of the two, shape of a sample)"""


class Spare(NamedTuple):
    """The buffer of a message to come. free: the point of the computing stream at which whatever
    was in its memory had been used."""

    buffer: Tensor
    free: StreamMark


@dataclass(frozen=True)
class StageLinks:
    """The messages of one stage. group: the group of all stages, which counts and logs them; alone:
    groups of the two stages of a link, on backends where messages would otherwise block each other;
    stream: the stream on which receives are started; spares: the buffer of the next one of each
    kind."""

    group: Group
    alone: Mapping[tuple[Direction, Pair], dist.ProcessGroup] = field(default_factory=dict)
    stream: SideStream = HOST_STREAM
    spares: dict[MessageKind, Spare] = field(default_factory=dict)

    def start_send(self, direction: Direction, tensor: Tensor, stage: int) -> Pending:
        """Send a tensor to another stage, without waiting. direction: that of the pass that
        receives it."""
        over = self.alone.get((direction, (self.group.rank, stage)))
        return self.group.start_send(tensor, stage, over=over)

    def start_receive(
        self, direction: Direction, shape: Sequence[int], like: Tensor, stage: int, *, number: int = 0
    ) -> Pending:
        """Receive a tensor from another stage, without waiting; it is received while the kernels
        run that were queued since the last call for a tensor of its kind. like: gives its dtype and
        device; number: of the tensor, where a stage sends several."""
        over = self.alone.get((direction, (stage, self.group.rank)))
        kind = direction, stage, number, tuple(shape[1:])
        spare = self.spares.pop(kind, None)
        if spare is None or spare.buffer.shape != torch.Size(shape):
            spare = self._spare(shape, like)
        self.spares[kind] = self._spare(shape, like)
        with self.stream.running():
            self.stream.follow(spare.free)
            return self.group.start_receive(spare.buffer, stage, over=over)

    def _spare(self, shape: Sequence[int], like: Tensor) -> Spare:
        buffer = torch.empty(shape, dtype=like.dtype, device=like.device)
        return Spare(buffer, self.stream.here())


def stage_links(mesh: Mesh, placement: StagePlacement, *, make_stream: MakeStream = side_stream) -> StageLinks:
    """The links of this rank's stage; every rank of the mesh calls it."""
    if mesh.pp.size == 1 or dist.get_backend(mesh.pp.process_group) == "gloo":
        return StageLinks(mesh.pp)
    directions: tuple[Direction, ...] = ("forward", "backward")
    alone: dict[tuple[Direction, Pair], dist.ProcessGroup] = {}
    for direction in directions:
        for pairs in link_rounds(placement):
            if direction == "backward":
                pairs = [(after, before) for before, after in pairs]
            groups = pair_groups(mesh, pairs, f"pp {direction}")
            alone |= {(direction, pair): group for pair, group in groups.items()}
    return StageLinks(mesh.pp, alone, make_stream(mesh.device, is_urgent=True))


def link_rounds(placement: StagePlacement) -> list[list[Pair]]:
    """The links that a forward pass uses, in rounds in which no stage is twice: from each stage to
    the next and, with several chunks, from the last to the first, or in a V back from each."""
    places = map(placement.place, range(placement.stages * placement.chunks))
    passed = ((before.stage, after.stage) for before, after in pairwise(places))
    pairs = dict.fromkeys((before, after) for before, after in passed if before != after)
    rounds: list[list[Pair]] = []
    for pair in pairs:
        free = (one for one in rounds if not {stage for other in one for stage in other} & {*pair})
        found = next(free, None)
        if found is None:
            rounds.append([pair])
        else:
            found.append(pair)
    return rounds
