"""The grid of the tensor-parallel ranks as a picture, and the blocks that one rank holds.

2d is one square of ranks; 2.5d is one square for each depth; 3d one for each place along output. A
square's rows are the slower axis (row, input), its columns the faster (col, weight). One rank is
marked, and the ranks of its group along each axis with it. In X, W and Y of Y = X W (hidden states,
first matrix of an MLP, its result) the blocks of the marked rank are filled.

In 2d on 4 ranks the square is 0 1 / 2 3; of rank 1 the col group is 0 1, the row group 1 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from mpctl.core.axes import GRID_AXES
from mpctl.core.tensor_grid import TensorGrid
from mpctl.core.topology import Topology
from mpctl.model.layout.topology import job_grid
from mpctl.plan.planning.plan import Plan
from mpctl.plan.planning.tensor_modes import HeldBlock, HeldPart, rank_blocks
from mpctl.render.markup import Raw, el, join, number

DRAWN_CELLS = 1024  # of all squares together
CELL, SMALLEST, HEAD, GAP = 44.0, 8.0, 22.0, 24.0
LARGEST_SQUARE = 352.0
MATRIX, BETWEEN, MOST_LINES = 150.0, 80.0, 64
AXES = {axis.name: axis for axis in GRID_AXES}
COLOURS = {"me": 1, "col": 0, "row": 2, "depth": 3, "weight": 3, "input": 0, "output": 2}
Drawing = tuple[Raw, float]  # and its height


@dataclass(frozen=True)
class GridPicture:
    """The first tp group of a plan in a mode other than 1d.

    square: ranks of one square; shown: ranks of as many full squares as are drawn; marked: the
    second rank of the last square's first row; width: units that may be used.
    """

    grid: TensorGrid
    ranks: Sequence[int]
    blocks: tuple[HeldBlock, ...]
    square: int
    shown: int
    marked: int
    width: float

    @classmethod
    def find(cls, plan: Plan, topology: Topology, width: float) -> GridPicture | None:
        """The picture; None in 1d, and where one square has more cells than can be drawn."""
        grid = job_grid(plan.job)
        if grid.mode == "1d":
            return None
        across, down, *_ = grid.axes.values()
        square = across * down
        if square > DRAWN_CELLS:
            return None
        shown = min(grid.size, DRAWN_CELLS // square * square)
        ranks, marked = topology.group(0, "tp"), shown - square + 1
        blocks = rank_blocks(plan, topology, ranks[marked])
        return cls(grid, ranks, blocks, square, shown, marked, width)

    @property
    def label(self) -> str:
        """Description of the picture, in words."""
        sizes = " x ".join(f"{axis} {size}" for axis, size in self.grid.axes.items())
        more = f", the first {self.shown}" if self.shown < self.grid.size else ""
        return f"Grid of the {self.grid.size} ranks of the first tp group: {sizes}{more}"

    def draw(self) -> Drawing:
        """The squares and, where a model is known, the blocks below them."""
        squares, height = self._squares()
        if not self.blocks:
            return squares, height
        y = height + GAP
        blocks, high = self._matrices()
        below = el("g", blocks, transform=f"translate(0 {number(y)})")
        return join([squares, below]), y + high

    def legend(self) -> list[tuple[int, str]]:
        """The marked rank and its group along each axis, as number of a colour and text."""
        items = [(COLOURS["me"], f"rank {self.ranks[self.marked]}")]
        for axis in self.grid.axes:
            if self.grid.axes[axis] > 1:
                coords = (self.grid.coords(at) for at in range(self.grid.size))
                along = [at for at, place in enumerate(coords) if self._differs(place) in ([], [axis])]
                members = ", ".join(str(self.ranks[at]) for at in along)
                items.append((COLOURS[axis], f"its {axis} group [{members}]: {AXES[axis].sends}"))
        return items

    def _differs(self, place: dict[str, int]) -> list[str]:
        """The axes along which a place differs from the marked rank."""
        marked = self.grid.coords(self.marked)
        return [axis for axis in place if place[axis] != marked[axis]]

    def _squares(self) -> Drawing:
        across = next(iter(self.grid.axes.values()))
        cell = max(SMALLEST, min(CELL, LARGEST_SQUARE / across))
        side = across * cell
        columns = max(1, int((self.width + GAP) // (side + GAP)))
        count = self.shown // self.square
        placed = [
            el(
                "g",
                self._one_square(number_, cell),
                transform=f"translate({number(number_ % columns * (side + GAP))} "
                f"{number(number_ // columns * (side + HEAD + GAP))})",
            )
            for number_ in range(count)
        ]
        return join(placed), -(-count // columns) * (side + HEAD + GAP) - GAP

    def _one_square(self, at: int, cell: float) -> Raw:
        fast, slow, *outer = self.grid.axes
        across, size = self.grid.axes[fast], self.square
        title = f"{outer[0]} {at}" if outer else f"{slow} down, {fast} across"
        cells = [
            self._cell(index, at_cell % across * cell, HEAD + at_cell // across * cell, cell)
            for at_cell, index in enumerate(range(at * size, (at + 1) * size))
        ]
        return join([el("text", title, y=14), *cells])

    def _cell(self, index: int, x: float, y: float, cell: float) -> Raw:
        coords = self.grid.coords(index)
        place = ", ".join(f"{axis} {coords[axis]}" for axis in coords)
        rank, middle, differs = self.ranks[index], x + cell / 2, self._differs(coords)
        colour = COLOURS[differs[0] if differs else "me"] if len(differs) < 2 else None
        words = (
            []
            if cell < 24
            else [
                el(
                    "text",
                    rank,
                    x=number(middle),
                    y=number(y + cell / 2 + 4),
                    text_anchor="middle",
                    class_="on-cell" if colour is not None else None,
                )
            ]
        )
        return el(
            "g",
            el("title", f"rank {rank}: {place}"),
            el(
                "rect",
                x=number(x),
                y=number(y),
                width=number(cell - 2),
                height=number(cell - 2),
                rx=3,
                class_="box" if colour is None else f"cell g{colour}",
            ),
            *words,
        )

    def _matrices(self) -> Drawing:
        drawn, x = [], 0.0
        for held, sign in zip(self.blocks, ("·", "=", ""), strict=True):
            drawn.append(el("g", join(_matrix(held)), transform=f"translate({number(x)} 0)"))
            x += MATRIX
            drawn.append(
                el(
                    "text",
                    sign,
                    x=number(x + BETWEEN / 2),
                    y=number(HEAD + MATRIX / 2),
                    text_anchor="middle",
                    class_="title",
                )
            )
            x += BETWEEN
        return join(drawn), HEAD + MATRIX + 40


def _matrix(held: HeldBlock) -> Iterator[Raw]:
    """A matrix with the lines along which it is cut, and the block that is held."""
    rows, columns = held.rows, held.columns
    title = f"{held.tensor}: {rows.dim} {rows.size} x {columns.dim} {columns.size}"
    yield el("text", title, y=14)
    frame = el("rect", y=HEAD, width=MATRIX, height=MATRIX, class_="box")
    x, width = _extent(columns)
    y, height = _extent(rows)
    words = f"{rows.text}, {columns.text}"
    block = el(
        "rect",
        el("title", words),
        x=number(x),
        y=number(HEAD + y),
        width=number(width),
        height=number(height),
        class_=f"cell g{COLOURS['me']}",
    )
    yield from (frame, block, el("path", d="".join(_cuts(rows, columns)), class_="tick"))
    for line, part in enumerate((rows, columns)):
        yield el("text", part.text, y=number(HEAD + MATRIX + 16 + 16 * line), class_="dim")


def _extent(part: HeldPart) -> tuple[float, float]:
    unit = MATRIX / part.size
    return part.block.start * unit, len(part.block) * unit


def _cuts(rows: HeldPart, columns: HeldPart) -> Iterator[str]:
    for at in islice(range(1, rows.parts), MOST_LINES if rows.parts <= MOST_LINES else 0):
        yield f"M0 {number(HEAD + MATRIX * at / rows.parts)}h{number(MATRIX)}"
    for at in islice(range(1, columns.parts), MOST_LINES if columns.parts <= MOST_LINES else 0):
        yield f"M{number(MATRIX * at / columns.parts)} {number(HEAD)}v{number(MATRIX)}"
