"""Placement of ranks: nodes as boxes of ranks, rank groups, grids of tp ranks, experts, a list of all ranks.

Colour is never the only carrier: each cell names its rank, and its tp group by a letter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import RenderableType
from rich.panel import Panel
from rich.text import Text

from mpctl.core.axes import GRID_AXES
from mpctl.core.topology import Topology
from mpctl.model.layout.link_levels import shown_levels
from mpctl.model.layout.topology import expert_homes
from mpctl.plan.planning.document import rank_entry
from mpctl.plan.planning.plan import Plan
from mpctl.plan.planning.summary import find_holder_name
from mpctl.render.cells import expert_axes, experts_text, group_number, letters, node_layers, place_names
from mpctl.render.fold import groups_text, members_text, nodes_are_alike, span_text, stage_layers_text
from mpctl.render.parts import DataTable, Part, Picture, Section, Sentence, table_of

if TYPE_CHECKING:
    from mpctl.render.markup import Raw

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
SHOWN_NODES, GPUS_A_ROW = 4, 8
LEVEL_WIDTH = 15  # of the column of levels
GROUPS_WIDTH = 54  # characters of the column of members, which with the others make 80
DRAWN_RANKS = 64


def layout_parts(
    plan: Plan, topology: Topology, kinds: tuple[str, ...] | None, *, ranks: bool, full: bool
) -> Iterator[Part]:
    """kinds: list every group of these kinds; None: the first groups of each kind. ranks: list every
    rank. full: fold nothing."""
    yield Section("layout", "Layout")
    yield Picture(drawn=lambda: _map(plan, topology), letters=lambda: node_letters(plan, topology, full=full))
    yield from _homes(plan, topology)
    yield from grid_parts(plan, topology)
    yield from groups_parts(plan, topology, kinds, full=full)
    if ranks:
        yield ranks_table(plan, topology)


def _map(plan: Plan, topology: Topology) -> Iterable[Raw]:
    from mpctl.render.plan_map import map_of

    return map_of(plan, topology)


def _homes(plan: Plan, topology: Topology) -> Iterator[DataTable]:
    """Yield a table of experts: a row for each index along ep, with its ranks of the first stage."""
    homes = expert_homes(plan.job)
    if len(homes) < 2:
        return
    view = topology.view_of("ep")
    stage = view.group(0, *(axis for axis in view.sizes if axis != "pp"))
    rows = []
    for at, held in enumerate(homes):
        ranks = [rank for rank in stage if view.coords(rank)["ep"] == at]
        rows.append((f"ep {at}", span_text(held.start, held.stop - 1), members_text(ranks), f"{len(ranks):,}"))
    parts = f", 1/{plan.job.parallel.etp} of each" if plan.job.parallel.etp > 1 else ""
    title = f"Experts of a layer and the ranks of its stage that hold them{parts}; stage 0"
    columns = ("place", "experts", "ranks", "count")
    yield table_of(title, columns, rows, left=columns[:3], fold="both")


def node_letters(plan: Plan, topology: Topology, *, full: bool) -> Iterator[RenderableType]:
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


def groups_parts(plan: Plan, topology: Topology, kinds: tuple[str, ...] | None, *, full: bool) -> Iterator[Part]:
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
        yield table_of("Rank groups", columns, rows, left=("group", "within", "members"))
    if single:
        yield Sentence(f"groups of one rank: {', '.join(single)}", "note")


def ranks_table(plan: Plan, topology: Topology) -> DataTable:
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
    return table_of("Ranks", ("rank", "node", "local", *axes, "layers"), rows, left=("layers",))


def grid_parts(plan: Plan, topology: Topology) -> Iterator[Part]:
    """Yield the cuts and messages of each axis of the grid, the first tp group, and the blocks of its
    ranks; nothing in 1d."""
    axes = topology.parts.get("tp", ())
    if not axes:
        return
    known = {axis.name: axis for axis in GRID_AXES}
    rows = [(name, str(topology.sizes[name]), known[name].splits, known[name].sends) for name in axes]
    columns = ("axis", "ranks", "cuts", "sends")
    title = f"Tensor parallelism in {plan.job.parallel.tensor_mode}"
    yield table_of(title, columns, rows, left=("axis", "cuts", "sends"))
    yield Picture(drawn=lambda: _grid_figure(plan, topology), letters=lambda: _squares(topology, axes))
    yield from _blocks(plan, topology)


def _grid_figure(plan: Plan, topology: Topology) -> Iterable[Raw]:
    from mpctl.render.plan_map import grid_figure

    return grid_figure(plan, topology)


def _blocks(plan: Plan, topology: Topology) -> Iterator[DataTable]:
    """The blocks of the ranks of the first tp group."""
    from mpctl.plan.planning.tensor_modes import rank_blocks

    rows = []
    for rank in topology.group(0, "tp")[:DRAWN_RANKS]:
        held = rank_blocks(plan, topology, rank)
        coords = topology.coords(rank)
        place = ", ".join(f"{axis} {coords[axis]}" for axis in topology.parts["tp"])
        if held:
            texts = (f"{block.rows.text}, {block.columns.text}" for block in held)
            rows.append((f"rank {rank}", place, *texts))
    if rows:
        columns = ("rank", "place", "X", "W", "Y")
        yield table_of(f"Blocks of Y = X W that {len(rows)} ranks hold", columns, rows, left=columns, fold="both")


def _squares(topology: Topology, axes: tuple[str, ...]) -> Iterator[RenderableType]:
    """The first tp group: a square for each place along the slowest of three axes."""
    if topology.group_size("tp") > DRAWN_RANKS:
        return
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
