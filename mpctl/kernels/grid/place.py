"""Where one rank stands in the grid of the tensor-parallel ranks, and its share of each tensor.

The grid says which axes cut what (mpctl/tensor_grid.py); with the coordinates of a rank that is a
block of each dimension. Where several outputs are fused in one matrix (q, k and v), each is cut by
itself, so that a rank holds whole heads of all three.

By hand, 2d on 4 ranks, rank 1 (row 0, column 1), a matrix [out 8, in 4]: rows 4..8, columns 0..2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mpctl.shard import Shard
from mpctl.tensor_grid import Axes, TensorGrid
from mpctl.transport.group import Group


@dataclass(frozen=True)
class GridPlace:
    """One rank of a grid. rank: its number among the tensor-parallel ranks; groups: those that it
    is in, by their names in `TensorGrid.groups`."""

    grid: TensorGrid
    rank: int
    groups: Mapping[str, Group]

    @cached_property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate on each axis of the grid."""
        return self.grid.coords(self.rank)

    def group(self, *axes: str) -> Group:
        """The group over these axes; of one rank where their sizes are 1."""
        kind = self.grid.kind_of(axes)
        return self.groups[kind] if kind else Group()

    def block(self, size: int, axes: Axes) -> range:
        """The block of `range(size)` that this rank keeps of a dimension that the axes cut. Raises
        ValueError where they do not divide it."""
        return self.grid.block(size, axes, self.coords)

    def samples(self, count: int, *, inside: bool = False) -> range:
        """Which samples of a micro batch of so many this rank holds, between the layers or inside.
        Raises ValueError where the grid does not divide them."""
        return self.block(count, self.grid.sample_axes(inside=inside))

    def shard(
        self, shape: tuple[int, ...], dims: tuple[str, ...], parts: Sequence[int] | None = None
    ) -> Shard:
        """This rank's part of a parameter with these named dimensions. parts: sizes of the fused
        parts along the first dimension, each of which is cut by itself. Raises ValueError where the
        grid does not divide a dimension."""
        cuts: dict[int, tuple[range, ...]] = {}
        for dim, axes in enumerate(self.grid.weight_axes(dims)):
            if self.grid.parts(axes) > 1:
                sizes = parts if parts is not None and dim == 0 else (shape[dim],)
                cuts[dim] = tuple(self._blocks(sizes, axes))
        return Shard(shape, cuts)

    def _blocks(self, sizes: Sequence[int], axes: Axes) -> list[range]:
        blocks, offset = [], 0
        for size in sizes:
            own = self.block(size, axes)
            blocks.append(range(own.start + offset, own.stop + offset))
            offset += size
        return blocks
