"""What each rank of a tensor-parallel grid holds of a layer's product Y = X W.

X [samples, hidden] are the hidden states of a micro batch before an MLP, W [hidden, ffn] its first
matrix, Y [samples, ffn] what stands behind it (tensor_grid.py says how the axes cut them). By hand,
2d on 4 ranks, 4 samples, hidden 8, ffn 16: rank 2, at row 1 and col 0, has samples 2-3 and hidden
0-3 of X, hidden 4-7 and ffn 0-7 of W, samples 2-3 and ffn 0-7 of Y.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpctl.layout.topology import job_grid
from mpctl.planning.layout_settings import layout_of
from mpctl.planning.plan import Plan
from mpctl.spec.job import JobSpec
from mpctl.tensor_grid import Axes, TensorGrid
from mpctl.topology import Topology

if TYPE_CHECKING:
    from mpctl.planning.schemas import TensorBlocksPart, TensorGridPart


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A block of one dimension: `block` of its `size`, which is cut into `parts`."""

    dim: str
    size: int
    parts: int
    block: range

    @property
    def text(self) -> str:
        """`hidden 0-383 of 768`."""
        first, last = self.block[0], self.block[-1]
        span = str(first) if first == last else f"{first}-{last}"
        return f"{self.dim} {span} of {self.size}"


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """The block of a matrix that a rank holds, by rows and columns."""

    tensor: str
    rows: HeldPart
    columns: HeldPart


def held_blocks(
    grid: TensorGrid, sizes: Mapping[str, int], rank: int
) -> tuple[HeldBlock, HeldBlock, HeldBlock]:
    """The blocks of X, W and Y of one rank of the grid, by its number in the tp group.

    sizes: whole `samples`, `hidden` and `ffn`. Raises ValueError where the grid does not divide
    them.
    """
    coords, (ffn, hidden) = grid.coords(rank), grid.weight_axes(("ffn", "hidden"))

    def part(dim: str, axes: Axes) -> HeldPart:
        return HeldPart(dim, sizes[dim], grid.parts(axes), grid.block(sizes[dim], axes, coords))

    inside = part("samples", grid.sample_axes(inside=True))
    return (
        HeldBlock("X", part("samples", grid.sample_axes()), part("hidden", grid.hidden_axes)),
        HeldBlock("W", part("hidden", hidden), part("ffn", ffn)),
        HeldBlock("Y", inside, part("ffn", grid.feature_axes)),
    )


def rank_blocks(plan: Plan, topology: Topology, rank: int) -> tuple[HeldBlock, ...]:
    """The blocks of one rank of the world; none in 1d and of a plan that is not estimated."""
    model, grid = plan.job.model, job_grid(plan.job)
    if model is None or plan.layout is None or grid.mode == "1d":
        return ()
    samples = plan.job.training.micro_batch_size
    sizes = {"samples": samples, "hidden": model.hidden, "ffn": model.ffn}
    return held_blocks(grid, sizes, topology.group(rank, "tp").index(rank))


def blocks_entry(plan: Plan, topology: Topology, rank: int) -> TensorBlocksPart:
    """The blocks as a part of mpctl.rank/1."""
    blocks = rank_blocks(plan, topology, rank)
    if not blocks:
        return {}
    return {
        "tensor_blocks": {
            held.tensor: {
                part.dim: [part.block.start, part.block.stop] for part in (held.rows, held.columns)
            }
            for held in blocks
        }
    }


def grid_entry(job: JobSpec) -> TensorGridPart:
    """The mode of tensor parallelism and its grid as a part of mpctl.plan/1."""
    depth = layout_of(job).tensor_depth
    axes = dict(job_grid(job).axes)
    return {"tensor_mode": job.parallel.tensor_mode, "tensor_depth": depth, "tensor_grid": axes}
