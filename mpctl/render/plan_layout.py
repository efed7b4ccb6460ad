"""Where ranks sit: nodes as boxes of ranks, rank groups, and a list of all ranks.

Colour is never the only carrier: each cell names its rank, and its tp group by a letter.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.columns import Columns
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mpctl.axes import GROUP_KINDS
from mpctl.planning.document import rank_entry
from mpctl.planning.plan import Plan
from mpctl.render.cells import group_number, letters
from mpctl.render.console import plain_table
from mpctl.render.fold import groups_text, layers_text, members_text, merged, nodes_are_alike
from mpctl.topology import Topology

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
SHOWN_NODES, GPUS_A_ROW, ROOM = 4, 8, 48


def nodes_part(plan: Plan, topology: Topology, *, full: bool) -> Iterator[RenderableType]:
    """Few nodes as boxes; of many that are alike the first one. full: all of them."""
    shown = range(topology.nodes)
    if not full and topology.nodes > SHOWN_NODES:
        shown = range(1 if nodes_are_alike(topology) else SHOWN_NODES)
    boxes = [_node(plan, topology, node) for node in shown]
    yield Columns(boxes, padding=(0, 1))
    if len(shown) == 1 < topology.nodes:
        more = f"nodes 1 to {topology.nodes - 1}: as node 0, {topology.gpus_per_node} ranks on each"
        yield Text(more, style="dim")
    elif len(shown) < topology.nodes:
        yield Text(f"... and {topology.nodes - len(shown):,} more nodes (--full)", style="dim")
    places = ", ".join(f"{name} ({name[0]})" for name in ("dp", "pp", *_cp(topology)))
    yield Text(f"a cell: rank and tp group; below it its place along {places}", style="dim")


def _cp(topology: Topology) -> tuple[str, ...]:
    return ("cp",) if topology.sizes["cp"] > 1 else ()


def _node(plan: Plan, topology: Topology, node: int) -> Panel:
    first = node * topology.gpus_per_node
    ranks = range(first, min(first + topology.gpus_per_node, topology.world_size))
    wide = min(len(ranks), 4 if len(ranks) <= 8 else GPUS_A_ROW)
    lines = [_row(topology, ranks[at : at + wide]) for at in range(0, len(ranks), wide)]
    title = f"node {node}" + (f" · {_node_layers(plan, topology, ranks)}" if plan.stages else "")
    width = max(len(lines[0]) // 2, len(title) + 2) + 4
    return Panel(Text("\n").join(lines), title=title, border_style="dim", width=width)


def _node_layers(plan: Plan, topology: Topology, ranks: range) -> str:
    """The layers that a node holds, of all its stages."""
    assert plan.stages is not None
    stages = sorted({topology.coords(rank)["pp"] for rank in ranks})
    return f"layers {layers_text(merged(span for s in stages for span in plan.stages[s]))}"


def _row(topology: Topology, ranks: range) -> Text:
    """GPUs side by side: rank and tp group, and below its place along the other axes."""
    upper, lower = Text(), Text()
    has_cp, digits = topology.sizes["cp"] > 1, len(str(topology.world_size - 1))
    for rank in ranks:
        coords, group = topology.coords(rank), group_number(topology, rank, ("tp",))
        place = f" d{coords['dp']} p{coords['pp']}" + (f" c{coords['cp']}" if has_cp else "")
        head = f" {rank:>{digits}} {letters(group)} "
        wide = max(len(place), len(head))
        upper.append(head.ljust(wide), f"black on {COLOURS[group % len(COLOURS)]}").append(" ")
        lower.append(place.ljust(wide + 1), "dim")
    return upper.append("\n").append_text(lower)


def groups_part(
    topology: Topology, kinds: tuple[str, ...] | None, *, full: bool
) -> Iterator[RenderableType]:
    """The groups of each kind; kinds None: all kinds, of each the first groups. full: every one."""
    if kinds == ():
        return
    table = plain_table("\nRank groups", ("group", "count", "size", "members"),
                        left=("group", "members"))  # fmt: skip
    single = []
    for kind in kinds or GROUP_KINDS:
        if kinds is None and not full and len(topology.find_group(kind, 0) or ()) == 1:
            single.append(kind)
            continue
        groups = topology.kind_groups(kind)
        if kinds is not None or full:
            members = " ".join(members_text(group, whole=True) for group in groups)
        else:
            members = groups_text(groups, ROOM)
        table.add_row(kind, f"{len(groups):,}", str(len(groups[0])), members)
    if table.row_count:
        yield table
    if single:
        yield Text(f"groups of one rank: {', '.join(single)}", style="dim")


def ranks_part(plan: Plan, topology: Topology) -> Table:
    """Every rank with its place and its layers."""
    axes = [axis for axis in topology.order if topology.sizes[axis] > 1]
    columns = ("rank", "node", "local", *axes, "layers")
    table = plain_table("\nRanks", columns, left=("layers",))
    for rank in range(topology.world_size):
        entry = rank_entry(plan, topology, rank)
        places = (str(entry["coords"][axis]) for axis in axes)
        layers = held_text(entry.get("layers", []), entry.get("stacks"))
        table.add_row(str(rank), str(entry["node"]), str(entry["local_rank"]), *places, layers)
    return table


def held_text(spans: list[list[int]], stacks: dict[str, list[list[int]]] | None) -> str:
    """`0-5`; of an encoder and a decoder `enc 4-5, dec 0-3`."""
    if not stacks:
        return layers_text(spans)
    return ", ".join(f"{name[:3]} {layers_text(own)}" for name, own in stacks.items() if own)
