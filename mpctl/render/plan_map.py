"""The map of a page: nodes as boxes of GPUs, or as tiles where there are too many; the tp grid.

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
from mpctl.render.markup import Raw, el, number
from mpctl.render.page import scrolling
from mpctl.render.plan_svg import COLOURS, framed_levels, level_title, node_title
from mpctl.render.svg_grid import GridPicture

WIDTH = 1000.0


CHOICES = (*AXIS_NAMES, "mp")


def map_of(plan: Plan, topology: Topology) -> Iterator[Raw]:
    """Nodes and ranks as cells, with the choice of what is coloured."""
    drawn = boxes(topology)
    is_tiled = drawn[0].number is None
    kind = "dp" if is_tiled and topology.sizes["dp"] > 1 else "tp"
    groups = _groups_met(topology, drawn, kind)
    said = "Point at a cell, or move with the arrow keys, to see its groups; Enter holds it."
    yield _choices(topology, kind)
    yield _key(topology, drawn, kind)
    yield el("p", said, id="said", class_="said", role="status", aria_live="polite", hidden=True)
    yield el("div", *_map(plan, topology, drawn, groups), id="map", class_="tiles" if is_tiled else "nodes")


def grid_figure(plan: Plan, topology: Topology) -> Iterator[Raw]:
    """The grid of tp ranks, and Y = X W as it is cut among them."""
    picture = GridPicture.find(plan, topology, WIDTH)
    if picture is None:
        yield el("p", "The grid has too many ranks to be drawn.", class_="note")
        return
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
    matrices = ""
    if picture.blocks:
        rank = picture.ranks[picture.marked]
        matrices = f" Below it Y = X W of an MLP, of one micro batch, and the blocks that rank {rank} holds."
    yield el(
        "figure",
        scrolling(svg, picture.label),
        el("ul", *items, class_="legend cells", aria_label="Legend"),
        el("figcaption", f"{picture.label}.{matrices}"),
    )


def _key(topology: Topology, drawn: list[Box], kind: str) -> Raw:
    """Return the legend of the map: the cell, its letter and its coordinates. kind: the group's, first."""
    is_tiled = drawn[0].number is None
    what = "A tile is a node" if is_tiled else "A cell is a GPU with its rank"
    if is_tiled and len(drawn[0].cells) < topology.nodes:
        what = f"A tile is {len(drawn[0].cells[0]) // topology.gpus_per_node} nodes"
    of = f" group of {'its first rank' if is_tiled else 'the rank'}"
    below = f"below it the place along {place_names(topology)}"
    return el("p", f"{what}; the letter is the ", el("span", kind, id="kind"), f"{of}; {below}.", class_="note")


def layout_data(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Return the data for page.js: sizes, views, experts, groups and the layers of each stage."""
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
