"""The section "Layout": nodes as boxes of GPUs, or as tiles where there are too many; the tp grid.

Without a script every cell says its rank, tp group and place. page.js adds the choice of what is
coloured, and the groups of the rank that is pointed at; it gets sizes and strides, numbers alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from mpctl.core.axes import AXES, AXIS_NAMES, EXPERT_AXES, GRID_AXES
from mpctl.core.topology import Topology
from mpctl.model.layout.link_levels import LinkLevel
from mpctl.model.layout.topology import expert_homes
from mpctl.plan.planning.plan import Plan
from mpctl.plan.planning.summary import links_text
from mpctl.plan.planning.tensor_modes import rank_blocks
from mpctl.render.cells import (
    Box,
    boxes,
    cell_label,
    cell_title,
    coordinates_text,
    expert_axes,
    experts_text,
    group_number,
    letters,
    place_names,
)
from mpctl.render.fold import layers_text, span_text
from mpctl.render.html.frame import details, note, scrolling, section, table
from mpctl.render.markup import Raw, el, number
from mpctl.render.plan_svg import COLOURS, framed_levels, level_title, node_title
from mpctl.render.svg_grid import GridPicture

WIDTH, LISTED_RANKS = 1000.0, 64


def grid_part(plan: Plan, topology: Topology) -> list[Raw]:
    """Heading, picture and tables; empty in 1d."""
    mode = plan.job.parallel.tensor_mode
    if mode == "1d":
        return []
    return [
        el("h3", f"Tensor parallelism in {mode}"),
        _axes_table(plan, topology),
        *_figure(GridPicture.find(plan, topology, WIDTH)),
        *_blocks_table(plan, topology),
    ]


def _axes_table(plan: Plan, topology: Topology) -> Raw:
    known = {axis.name: axis for axis in GRID_AXES}
    rows = [(name, known[name].splits, known[name].sends, str(topology.sizes[name])) for name in topology.parts["tp"]]
    return table("Axes of the grid", ("axis", "cuts", "sends", "ranks"), rows, left=3)


def _figure(picture: GridPicture | None) -> list[Raw]:
    if picture is None:
        return [note("The grid has too many ranks to be drawn.")]
    drawn, height = picture.draw()
    svg = el(
        "svg",
        el("title", picture.label),
        drawn,
        viewBox=f"0 0 {number(WIDTH)} {number(height)}",
        width=number(WIDTH),
        height=number(height),
        role="img",
        aria_label=picture.label,
        class_="grid",
    )
    items = (el("li", el("i", class_=f"g{colour}"), text) for colour, text in picture.legend())
    return [
        el(
            "figure",
            scrolling(svg, picture.label),
            el("ul", *items, class_="legend cells", aria_label="Legend"),
            el("figcaption", f"{picture.label}. {_matrices(picture)}"),
        )
    ]


def _matrices(picture: GridPicture) -> str:
    if not picture.blocks:
        return ""
    rank = picture.ranks[picture.marked]
    return f"Below it Y = X W of an MLP, of one micro batch, and the blocks that rank {rank} holds."


def _blocks_table(plan: Plan, topology: Topology) -> list[Raw]:
    """The blocks of the ranks of the first tp group."""
    ranks = topology.group(0, "tp")[:LISTED_RANKS]
    rows = []
    for rank in ranks:
        held = rank_blocks(plan, topology, rank)
        coords = topology.coords(rank)
        place = ", ".join(f"{axis} {coords[axis]}" for axis in topology.parts["tp"])
        texts = (f"{block.rows.text}, {block.columns.text}" for block in held)
        if held:
            rows.append((f"rank {rank}", place, *texts))
    if not rows:
        return []
    caption = f"Blocks of Y = X W that {len(rows)} ranks hold"
    columns = ("rank", "place", "X", "W", "Y")
    return [details("What each rank holds", table(caption, columns, rows, left=5))]


LISTED, MEMBERS = 8, 16
CHOICES = (*AXIS_NAMES, "mp")


def layout_section(plan: Plan, topology: Topology) -> Raw:
    """The section "Layout": nodes and ranks as cells, and their groups as a table."""
    drawn = boxes(topology)
    is_tiled = drawn[0].number is None
    kind = "dp" if is_tiled and topology.sizes["dp"] > 1 else "tp"
    groups = _groups_met(topology, drawn, kind)
    return section(
        "layout",
        "Layout",
        _choices(topology, kind),
        _key(topology, drawn, kind),
        el(
            "p",
            "Point at a cell, or move with the arrow keys, to see its groups; Enter holds it.",
            id="said",
            class_="said",
            role="status",
            aria_live="polite",
            hidden=True,
        ),
        el("div", *_map(plan, topology, drawn, groups), id="map", class_="tiles" if is_tiled else "nodes"),
        *([note(f"Links: {links}.")] if (links := links_text(plan, topology)) else []),
        details("Rank groups as a table", groups_table(topology)),
        *_homes(plan, topology),
        *grid_part(plan, topology),
    )


def _homes(plan: Plan, topology: Topology) -> list[Raw]:
    """Where experts live: a row for each place along ep, with its ranks of the first stage."""
    homes = expert_homes(plan.job)
    if len(homes) < 2:
        return []
    view = topology.view_of("ep")
    stage = view.group(0, *(axis for axis in view.sizes if axis != "pp"))
    rows = []
    for at, held in enumerate(homes):
        ranks = [rank for rank in stage if view.coords(rank)["ep"] == at]
        experts = span_text(held.start, held.stop - 1)
        rows.append((f"ep {at}", experts, _members(ranks), f"{len(ranks):,}"))
    parts = f", 1/{plan.job.parallel.etp} of each" if plan.job.parallel.etp > 1 else ""
    caption = f"Experts of a layer and the ranks of its stage that hold them{parts}; stage 0"
    columns = ("place", "experts", "ranks", "count")
    return [details("Where each expert is", table(caption, columns, rows, left=3))]


def _key(topology: Topology, drawn: list[Box], kind: str) -> Raw:
    """What a cell is, and what its letter and its coordinates mean. kind: the group's, first."""
    is_tiled = drawn[0].number is None
    what = "A tile is a node" if is_tiled else "A cell is a GPU with its rank"
    if is_tiled and len(drawn[0].cells) < topology.nodes:
        what = f"A tile is {len(drawn[0].cells[0]) // topology.gpus_per_node} nodes"
    of = f" group of {'its first rank' if is_tiled else 'the rank'}"
    below = f"below it the place along {place_names(topology)}"
    return note(f"{what}; the letter is the ", el("span", kind, id="kind"), f"{of}; {below}.")


def layout_data(plan: Plan, topology: Topology) -> dict[str, Any]:
    """What page.js needs: numbers, and the layers of each stage."""
    stages = plan.stages or ()
    return {
        "world": topology.world_size,
        "perNode": topology.gpus_per_node,
        "views": [
            {"order": list(seen.order), "sizes": dict(seen.sizes), "strides": seen.strides}
            for seen in (topology, *topology.views)
        ],
        "experts": [span_text(held.start, held.stop - 1) for held in expert_homes(plan.job)],
        "kinds": {kind: list(topology.kinds[kind]) for kind in _choosable(topology)},
        "layers": [layers_text(spans) for spans in stages],
        "colours": COLOURS,
    }


def _choices(topology: Topology, chosen: str) -> Raw:
    titles = {axis.name: axis.title for axis in (*AXES, *GRID_AXES, *EXPERT_AXES)}
    titles |= {"mp": "model (tp and pp)", "etp_ep": "experts' (etp and ep)"}
    shown = [kind for kind in _choosable(topology) if topology.group_size(*topology.kinds[kind]) > 1 or kind == chosen]
    items = [
        el(
            "label",
            el("input", type="radio", name="kind", value=kind, checked=kind == chosen),
            f"{kind} ",
            el("small", titles[kind]),
        )
        for kind in shown
    ]
    return el("fieldset", el("legend", "Colour by group"), *items, id="kinds", hidden=True)


def _choosable(topology: Topology) -> tuple[str, ...]:
    """The kinds of groups by which cells can be coloured, those of a grid of tp ranks behind tp,
    those of experts last."""
    first, *others = CHOICES
    cut = expert_axes(topology)
    of_experts = [*["ep", "edp"] * bool(cut), *["etp", "etp_ep"] * ("etp" in cut)]
    return (first, *topology.parts.get(first, ()), *others, *of_experts)


def _groups_met(topology: Topology, drawn: list[Box], kind: str) -> dict[int, int]:
    """First rank of a cell -> its group, numbered as they are met: tiles of 8 meet each eighth."""
    met: dict[int, int] = {}
    return {
        ranks[0]: met.setdefault(group_number(topology, ranks[0], topology.kinds[kind]), len(met))
        for box in drawn
        for ranks in box.cells
    }


def _map(plan: Plan, topology: Topology, drawn: list[Box], groups: dict[int, int]) -> Iterator[Raw]:
    """The boxes, in a frame for each network of links beyond a node, outermost first."""
    if drawn[0].number is None:
        tiles, size = drawn[0].cells, len(drawn[0].cells[0])
        levels = framed_levels(plan, topology, size)
        inner = levels[-1].ranks // size if levels else len(tiles)
        drawn = [Box(None, tiles[at : at + inner]) for at in range(0, len(tiles), inner)]
    else:
        levels = framed_levels(plan, topology, topology.gpus_per_node)
    yield from _framed(plan, topology, levels, drawn, groups)


def _framed(
    plan: Plan, topology: Topology, levels: Sequence[LinkLevel], drawn: list[Box], groups: dict[int, int]
) -> Iterator[Raw]:
    if not levels:
        yield from (_box(plan, topology, box, groups) for box in drawn)
        return
    level, *inner = levels
    for at, held in groupby(drawn, key=lambda box: box.cells[0][0] // level.ranks):
        inside = _framed(plan, topology, inner, list(held), groups)
        title = el("h3", level_title(level, at))
        yield el("div", title, el("div", *inside, class_="inside"), class_="level")


def _box(plan: Plan, topology: Topology, box: Box, groups: dict[int, int]) -> Raw:
    cells = [_cell(topology, ranks, groups[ranks[0]]) for ranks in box.cells]
    if box.number is None:
        return el("ol", *cells)
    wide = min(len(cells), 4 if len(cells) <= 8 else 8)
    grid = el("ol", *cells, style=f"--wide:{wide}", aria_label=f"GPUs of node {box.number}")
    return el("div", el("h3", node_title(plan, topology, box)), grid, class_="node")


def _cell(topology: Topology, ranks: range, group: int) -> Raw:
    return el(
        "li",
        el("b", cell_label(topology, ranks)),
        " ",
        el("em", letters(group)),
        el("small", coordinates_text(topology, ranks)),
        *(el("small", text) for text in (experts_text(topology, ranks),) if text),
        class_=f"g{group % COLOURS}",
        data_r=ranks[0],
        data_n=len(ranks),
        title=cell_title(topology, ranks),
    )


def groups_table(topology: Topology) -> Raw:
    """The first groups of each kind, and how many more there are."""
    rows = []
    for kind in topology.kinds:
        groups = _first_groups(topology, kind)
        members = " ".join(_members(group) for group in groups)
        count = topology.world_size // topology.group_size(*topology.kinds[kind])
        more = f" … {count - len(groups):,} more" if count > len(groups) else ""
        rows.append((kind, members + more, f"{count:,}", str(len(groups[0]))))
    return table("Rank groups, the first of each kind", ("group", "members", "count", "size"), rows, left=2)


def _first_groups(topology: Topology, kind: str) -> list[Any]:
    """By their first members, without listing those of a large world."""
    groups: list[Any] = []
    rank = 0
    while len(groups) < LISTED and rank < min(topology.world_size, 4096):
        group = topology.find_group(kind, rank)
        if group is not None and group[0] == rank:
            groups.append(group)
        rank += 1
    return groups


def _members(group: Any) -> str:
    if len(group) == 1:
        return f"[{group[0]}]"
    if isinstance(group, range) and group.step == 1 and len(group) > MEMBERS:
        return f"[{span_text(group[0], group[-1])}]"
    shown = ",".join(map(str, group[:MEMBERS]))
    return f"[{shown},…,{group[-1]}]" if len(group) > MEMBERS else f"[{shown}]"
