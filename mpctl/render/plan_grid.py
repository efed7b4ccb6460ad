"""The grid of the tensor-parallel ranks in a terminal: its axes, and its squares of ranks.

By hand, 3d on 8 ranks: squares `0 1 / 2 3` at output 0 and `4 5 / 6 7` at output 1, in which the
rows are input and the columns weight.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.columns import Columns
from rich.console import RenderableType
from rich.text import Text

from mpctl.axes import GRID_AXES
from mpctl.planning.plan import Plan
from mpctl.render.console import plain_table
from mpctl.topology import Topology

DRAWN_RANKS = 64


def grid_part(plan: Plan, topology: Topology) -> Iterator[RenderableType]:
    """What each axis of the grid cuts and sends, and the first tp group; nothing in 1d."""
    axes = topology.parts.get("tp", ())
    if not axes:
        return
    known = {axis.name: axis for axis in GRID_AXES}
    title = f"\nTensor parallelism in {plan.job.parallel.tensor_mode}"
    table = plain_table(title, ("axis", "ranks", "cuts", "sends"), left=("axis", "cuts", "sends"))
    for name in axes:
        table.add_row(name, str(topology.sizes[name]), known[name].splits, known[name].sends)
    yield table
    if topology.group_size("tp") <= DRAWN_RANKS:
        yield from _squares(topology, axes)


def _squares(topology: Topology, axes: tuple[str, ...]) -> Iterator[RenderableType]:
    """The first tp group: a square for each place along the slowest of three axes."""
    (fast, slow, *outer), ranks = axes, topology.group(0, "tp")
    across, down = topology.sizes[fast], topology.sizes[slow]
    digits = len(str(ranks[-1]))
    squares = []
    for at, first in enumerate(range(0, len(ranks), across * down)):
        starts = range(first, first + across * down, across)
        lines = [
            " ".join(f"{rank:>{digits}}" for rank in ranks[s : s + across]) for s in starts
        ]  # fmt: skip
        title = [f"{outer[0]} {at}"] if outer else []
        squares.append(Text("\n".join([*title, *lines])))
    yield Columns(squares, padding=(0, 3))
    yield Text(f"ranks of the first tp group: {slow} down, {fast} across", style="dim")
