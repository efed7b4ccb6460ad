"""The part of a tensor that a rank or a file holds, and how parts intersect, without torch.

A shard keeps some blocks of each dimension, and so every box that has one of its blocks along each.
Concatenated in the order of the blocks, the boxes are the local tensor. A shard with any cuts is
assembled box by box from shards with other cuts, since the intersection of two boxes is a box.

Rows 2 and 5 of a [6, 4] tensor, a fused pair of parts over t = 3 ranks, and columns 2 and 3 of it:

>>> shard = Shard((6, 4), {0: (range(2, 3), range(5, 6)), 1: (range(2, 4),)})
>>> shard.local_shape, list(shard.boxes())
((2, 2), [(range(2, 3), range(2, 4)), (range(5, 6), range(2, 4))])
>>> shard.slices((range(5, 6), range(3, 4)))
(slice(1, 2, None), slice(1, 2, None))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod
from operator import getitem

Box = tuple[range, ...]
"""Global coordinates, a range for each dimension."""


@dataclass(frozen=True)
class Shard:
    """The part kept of a tensor of full size `shape`. cuts: for each dimension that is split, the
    blocks that are kept, in local order; the other dimensions are full. Raises ValueError where
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
        """The blocks kept along `dim`: a single one if it is not split."""
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
        """The slices of the local tensor that are `box`, which is inside one of `boxes`."""
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
    """Return the number of elements of a box."""
    return prod(map(len, box))


def meetings(one: Shard, other: Shard) -> Iterator[Box]:
    """The boxes that two shards of one tensor share.

    >>> rows, columns = Shard((4, 4), {0: (range(0, 2),)}), Shard((4, 4), {1: (range(3, 4),)})
    >>> list(meetings(rows, columns))
    [(range(0, 2), range(3, 4))]
    """
    return product(*(_shared_spans(one, other, dim) for dim in range(len(one.shape))))


def _shared_spans(one: Shard, other: Shard, dim: int) -> list[range]:
    pairs = product(one.blocks(dim), other.blocks(dim))
    spans = (range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
    return [span for span in spans if span]


class Coverage:
    """Elements of `target` found so far. parts: all boxes that may be found, inside `target`.

    Every edge of a box cuts its dimension into spans, which no box covers in part; a cell is a span
    of each dimension. The parts of a grid of q x q ranks are its cells, those of 2.5d d times.

    >>> halves = [(range(4), range(2)), (range(3), range(4))]
    >>> coverage = Coverage(Shard((4, 4)), halves)
    >>> [coverage.add(box) for box in halves], coverage.missing
    ([True, True], [(range(3, 4), range(2, 4))])
    """

    def __init__(self, target: Shard, parts: Sequence[Box]) -> None:
        boxes = [*target.boxes(), *parts]
        self._edges = [
            sorted({edge for box in boxes for edge in (box[dim].start, box[dim].stop)})
            for dim in range(len(target.shape))
        ]
        self._numbers = [{edge: i for i, edge in enumerate(edges)} for edges in self._edges]
        self._cells = {cell for box in target.boxes() for cell in self._cells_of(box)}

    @property
    def missing(self) -> list[Box]:
        """The missing elements, as boxes that do not overlap."""
        spans = [[range(a, b) for a, b in pairwise(edges)] for edges in self._edges]
        return [tuple(map(getitem, spans, cell)) for cell in sorted(self._cells)]

    def add(self, part: Box) -> bool:
        """Count a part as found; returns whether it has elements that were not found before."""
        before = len(self._cells)
        self._cells.difference_update(self._cells_of(part))
        return len(self._cells) < before

    def _cells_of(self, box: Box) -> Iterator[tuple[int, ...]]:
        numbers = zip(self._numbers, box, strict=True)
        return product(*(range(of[span.start], of[span.stop]) for of, span in numbers))


def covers(shape: tuple[int, ...], shards: Sequence[Shard]) -> bool:
    """Whether the shards together have all of a tensor of this shape."""
    boxes = [box for shard in shards for box in shard.boxes()]
    coverage = Coverage(Shard(shape), boxes)
    for box in boxes:
        coverage.add(box)
    return not coverage.missing
