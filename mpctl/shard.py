"""The part of a tensor that a rank or a file holds, and how parts meet: without torch.

A shard keeps some blocks of each dimension, and so every box that has one of its blocks along each.
Side by side, in the order of the blocks, the boxes are the local tensor. A shard of any cuts is put
together from shards of any others box by box: what two boxes share is a box, and what is left of a
box without another is at most two boxes for each dimension.

Rows 2 and 5 of a [6, 4] tensor, a fused pair of parts over t = 3 ranks, and columns 2 and 3 of it:

>>> shard = Shard((6, 4), {0: (range(2, 3), range(5, 6)), 1: (range(2, 4),)})
>>> shard.local_shape, list(shard.boxes())
((2, 2), [(range(2, 3), range(2, 4)), (range(5, 6), range(2, 4))])
>>> shard.slices((range(5, 6), range(3, 4)))
(slice(1, 2, None), slice(1, 2, None))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod

Box = tuple[range, ...]
"""Global coordinates, a range for each dimension."""


@dataclass(frozen=True)
class Shard:
    """The part kept of a tensor of full size `shape`. cuts: of each dimension that is split, the
    blocks that are kept, in local order; the other dimensions are whole. Raises ValueError where
    blocks leave the shape or overlap."""

    shape: tuple[int, ...]
    cuts: Mapping[int, tuple[range, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for dim, blocks in self.cuts.items():
            if not 0 <= dim < len(self.shape):
                raise ValueError(f"dimension {dim} of a shape of {len(self.shape)}")
            for block in blocks:
                if not 0 <= block.start <= block.stop <= self.shape[dim]:
                    of = f"dimension {dim} of {self.shape}"
                    raise ValueError(f"block [{block.start}, {block.stop}) leaves {of}")
            for one, other in pairwise(sorted(filter(None, blocks), key=lambda b: b.start)):
                if other.start < one.stop:
                    starts = f"blocks [{one.start}, {one.stop}) and [{other.start}, {other.stop})"
                    raise ValueError(f"{starts} of dimension {dim} overlap")

    def blocks(self, dim: int) -> tuple[range, ...]:
        """The blocks kept along `dim`: one of all where it is whole."""
        return self.cuts.get(dim, (range(self.shape[dim]),))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this part: along each dimension the lengths of its blocks added up."""
        return tuple(sum(map(len, self.blocks(dim))) for dim in range(len(self.shape)))

    def boxes(self) -> Iterator[Box]:
        """The boxes of this part that have elements."""
        for box in product(*map(self.blocks, range(len(self.shape)))):
            if numel(box):
                yield box

    def slices(self, box: Box) -> tuple[slice, ...]:
        """Where the local tensor has `box`, which lies inside of one of `boxes`."""
        return tuple(self._slice(dim, span) for dim, span in enumerate(box))

    def _slice(self, dim: int, span: range) -> slice:
        offset = 0
        for block in self.blocks(dim):
            if block.start <= span.start and span.stop <= block.stop:
                first = offset + span.start - block.start
                return slice(first, first + len(span))
            offset += len(block)
        raise ValueError(f"{span} is in no block of dimension {dim}: {self.blocks(dim)}")


def numel(box: Box) -> int:
    """How many elements a box has."""
    return prod(map(len, box))


def intersect(one: Box, other: Box) -> Box | None:
    """The box that both share; None where they share nothing.

    >>> intersect((range(0, 4), range(8)), (range(2, 6), range(4, 9)))
    (range(2, 4), range(4, 8))
    """
    spans = zip(one, other, strict=True)
    shared = tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in spans)
    return shared if all(shared) else None


def subtract(box: Box, hole: Box) -> list[Box]:
    """What is left of a box without another, as boxes that do not overlap.

    >>> subtract((range(4), range(8)), (range(1, 3), range(2, 9)))
    [(range(0, 1), range(0, 8)), (range(3, 4), range(0, 8)), (range(1, 3), range(0, 2))]
    """
    shared = intersect(box, hole)
    if shared is None:
        return [box]
    left = []
    for dim, (span, cut) in enumerate(zip(box, shared, strict=True)):
        for side in (range(span.start, cut.start), range(cut.stop, span.stop)):
            if side:
                left.append((*shared[:dim], side, *box[dim + 1 :]))
    return left


def uncovered(target: Shard, parts: Iterable[Shard]) -> list[Box]:
    """What `target` needs and none of the parts has; parts of the same element count once.

    >>> halves = [Shard((4, 4), {1: (range(0, 2),)}), Shard((4, 4), {0: (range(0, 3),)})]
    >>> uncovered(Shard((4, 4)), halves)
    [(range(3, 4), range(2, 4))]
    """
    missing = list(target.boxes())
    for part in parts:
        if not missing:
            break
        for box in part.boxes():
            missing = [left for needed in missing for left in subtract(needed, box)]
    return missing
