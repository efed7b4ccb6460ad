"""One message of a training step as a value, and equal messages counted together.

A `Message` says everything that its bytes and its seconds follow from: the group that it goes over,
the kind of collective, its bytes, when in a step it is sent and which computation may hide it. The
lists of messages are made in layer_messages.py (tp and cp), p2p.py (between stages) and
gradient_messages.py (replicas), and put together in messages.py; whatever is counted in bytes or
timed in seconds is one of these lists, so that no message can have one without the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from mpctl.collectives import Kind

Phase = Literal["forward", "backward", "recompute", "transfer", "step"]
Cover = Literal["weight_gradient", "product", "layer", "last_backward", "stage"]


@dataclass(frozen=True, slots=True)
class Message:
    """`count` equal messages that one rank takes part in.

    axis: the group, by its name in plans: tp, cp, pp, dp_cp (the replicas), world, or a group of
    the grid that tp is in 2d, 2.5d and 3d (row, col, row-depth, input, ..). kind: of
    collective (mpctl/collectives.py). what: what is sent, in words. bytes: of
    the whole message, before a collective divides it over its ranks. phase: when it is sent: in
    every micro batch's forward, backward or repeated forward (recompute), between two stages
    (transfer), or once a step. cover: the computation that may hide it: the weight gradient of the
    product that sends it, the product itself, which is computed in `count` steps and sends beside
    each of them what the next one needs, or what the one before left; the layer's own pass, the
    last backward of the stage, or the work of the stages that exchange it; None where nothing does.
    product: the matrix product that sends it, else empty. stages: the pipeline stages that take
    part, where these are not all of them.
    """

    axis: str
    kind: Kind
    what: str
    bytes: int
    count: int = 1
    phase: Phase = "step"
    cover: Cover | None = None
    product: str = ""
    stages: tuple[int, ...] = ()

    def times(self, count: int) -> Message:
        """The message `count` times as often."""
        if count == 1:
            return self
        return Message(
            self.axis, self.kind, self.what, self.bytes, self.count * count, self.phase,
            self.cover, self.product, self.stages,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MessageCount:
    """How often messages of one kind and size are sent in a step, whenever that is; fields as a
    Message's."""

    axis: str
    kind: Kind
    what: str
    bytes: int
    count: int


def count_messages(messages: Iterable[Message]) -> Iterator[MessageCount]:
    """Equal messages counted together, in the order in which they first appear."""
    counts: Counter[tuple[str, Kind, str, int]] = Counter()
    for message in messages:
        counts[message.axis, message.kind, message.what, message.bytes] += message.count
    return (MessageCount(*key, count) for key, count in counts.items() if count)
