"""Where ranks sit: nodes as boxes of ranks, rank groups, grids of tp ranks, a list of all ranks.

Colour is never the only carrier: each cell names its rank, and its tp group by a letter.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.columns import Columns
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mpctl.core.axes import GRID_AXES
from mpctl.core.topology import Topology
from mpctl.model.layout.link_levels import shown_levels
from mpctl.plan.planning.document import rank_entry
from mpctl.plan.planning.plan import Plan
from mpctl.plan.planning.summary import find_holder_name
from mpctl.render.cells import expert_axes, experts_text, group_number, letters, node_layers, place_names
from mpctl.render.console import plain_table
from mpctl.render.fold import groups_text, members_text, nodes_are_alike, stage_layers_text

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
SHOWN_NODES, GPUS_A_ROW = 4, 8
LEVEL_WIDTH = 15  # of the column of levels
GROUPS_WIDTH = 54  # characters of the column of members, which with the others make 80


def nodes_part(plan: Plan, topology: Topology, *, full: bool) -> Iterator[RenderableType]:
    """A few nodes as boxes; of many that are alike the first one. full: all of them."""
    shown = range(topology.nodes)
    if not full and topology.nodes > SHOWN_NODES:
        shown = range(1 if nodes_are_alike(topology) else SHOWN_NODES)
    yield Columns([_node(plan, topology, node) for node in shown], padding=(0, 1))
    if len(shown) == 1 < topology.nodes:
        more = f"nodes 1 to {topology.nodes - 1}: as node 0, {topology.gpus_per_node} ranks on each"
        yield Text(more, style="dim")
    elif len(shown) < topology.nodes:
        yield Text(f"... and {topology.nodes - len(shown):,} more nodes (--full)", style="dim")
    places = place_names(topology)
    yield Text(f"a cell: rank and tp group; below it its place along {places}", style="dim")


def _node(plan: Plan, topology: Topology, node: int) -> Panel:
    first = node * topology.gpus_per_node
    ranks = range(first, min(first + topology.gpus_per_node, topology.world_size))
    columns = min(len(ranks), 4 if len(ranks) <= 8 else GPUS_A_ROW)
    lines = [_row(topology, ranks[at : at + columns]) for at in range(0, len(ranks), columns)]
    layers = node_layers(plan, topology, ranks)
    title = f"node {node}" + (f" · {layers}" if layers else "")
    widest = max(len(row) for line in lines for row in line.plain.split("\n"))
    width = max(widest, len(title) + 2) + 4
    return Panel(Text("\n").join(lines), title=title, border_style="dim", width=width)


def _row(topology: Topology, ranks: range) -> Text:
    """GPUs side by side: rank and tp group, below them the coordinates along other axes, and below
    these the place of its experts."""
    upper, lower, last = Text(), Text(), Text()
    has_cp, digits = topology.sizes["cp"] > 1, len(str(topology.world_size - 1))
    for rank in ranks:
        coords, group = topology.coords(rank), group_number(topology, rank, ("tp",))
        below = f" d{coords['dp']} p{coords['pp']}" + (f" c{coords['cp']}" if has_cp else "")
        head = f" {rank:>{digits}} {letters(group)} "
        experts = f" {text}" if (text := experts_text(topology, range(rank, rank + 1))) else ""
        width = max(len(below), len(head), len(experts))
        upper.append(head.ljust(width), f"black on {COLOURS[group % len(COLOURS)]}").append(" ")
        lower.append(below.ljust(width + 1), "dim")
        last.append(experts.ljust(width + 1), "dim")
    rows = [upper, lower, *([last] if expert_axes(topology) else [])]
    return Text("\n").join(rows)


def groups_part(
    plan: Plan, topology: Topology, kinds: tuple[str, ...] | None, *, full: bool
) -> Iterator[RenderableType]:
    """The groups of each kind; kinds None: all kinds, of each the first groups. full: every one.
    Where links join more than a node, with the innermost level that holds a group."""
    if kinds == ():
        return
    lists_all = full or kinds is not None
    levels = ["within"] if shown_levels(plan.job.cluster, topology) else []
    rows, single = [], []
    for kind in kinds or topology.kinds:
        if not lists_all and len(topology.find_group(kind, 0) or ()) <= 1:
            single.append(kind)
            continue
        groups = topology.kind_groups(kind)
        if lists_all:
            members = " ".join(members_text(group, whole=True) for group in groups)
        else:
            members = groups_text(groups, GROUPS_WIDTH - (LEVEL_WIDTH if levels else 0))
        within = [find_holder_name(plan, topology, kind) or "-" for _ in levels]
        rows.append((kind, f"{len(groups):,}", str(len(groups[0])), *within, members))
    if rows:
        columns = ("group", "count", "size", *levels, "members")
        yield plain_table("\nRank groups", columns, rows, left=("group", "within", "members"))
    if single:
        yield Text(f"groups of one rank: {', '.join(single)}", style="dim")


def ranks_part(plan: Plan, topology: Topology) -> Table:
    """Every rank with its node, its coordinates and its layers."""
    parts = topology.parts
    dense = (name for axis in topology.whole_order for name in (axis, *parts.get(axis, ())))
    names = dict.fromkeys((*dense, *(axis for view in topology.views for axis in view.order)))
    axes = [name for name in names if topology.group_size(name) > 1]
    rows = []
    for rank in range(topology.world_size):
        entry = rank_entry(plan, topology, rank)
        coords = (str(entry["coords"][axis]) for axis in axes)
        layers = stage_layers_text(entry.get("layers", []), entry.get("stacks"))
        rows.append((str(rank), str(entry["node"]), str(entry["local_rank"]), *coords, layers))
    columns = ("rank", "node", "local", *axes, "layers")
    return plain_table("\nRanks", columns, rows, left=("layers",))


DRAWN_RANKS = 64


def grid_part(plan: Plan, topology: Topology) -> Iterator[RenderableType]:
    """What each axis of the grid cuts and sends, and the first tp group; nothing in 1d."""
    axes = topology.parts.get("tp", ())
    if not axes:
        return
    known = {axis.name: axis for axis in GRID_AXES}
    title = f"\nTensor parallelism in {plan.job.parallel.tensor_mode}"
    rows = [(name, str(topology.sizes[name]), known[name].splits, known[name].sends) for name in axes]
    columns = ("axis", "ranks", "cuts", "sends")
    yield plain_table(title, columns, rows, left=("axis", "cuts", "sends"))
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
        lines = [" ".join(f"{rank:>{digits}}" for rank in ranks[s : s + across]) for s in starts]
        title = [f"{outer[0]} {at}"] if outer else []
        squares.append(Text("\n".join([*title, *lines])))
    yield Columns(squares, padding=(0, 3))
    yield Text(f"ranks of the first tp group: {slow} down, {fast} across", style="dim")
