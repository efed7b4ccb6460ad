"""A plan as one SVG file that needs nothing from the network: the layout and the step's timeline.

GPUs are coloured by tensor-parallel group, and each says its rank, the group's letter and its place
along the other axes. Frames around the nodes are the NVLink domain and the networks above that they
lie in. Where ranks share experts they are drawn a second time, coloured by place along ep: those of
one place hold the same experts, and the letter is the group in which tokens are sent to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from textwrap import wrap
from typing import NamedTuple

from mpctl.core.topology import Topology
from mpctl.core.units import plural, seconds_text
from mpctl.model.layout.link_levels import LinkLevel, shown_levels
from mpctl.model.layout.topology import expert_homes
from mpctl.plan.estimate.timeline import StepLine, find_step_line
from mpctl.plan.planning.plan import Plan
from mpctl.plan.planning.summary import (
    dense_sizes_text,
    expert_axes_text,
    links_text,
    model_name,
    over_text,
    placement_text,
    training_line,
    training_settings,
    verdict,
)
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
    node_layers,
)
from mpctl.render.fold import span_text
from mpctl.render.markup import Raw, el, join, number
from mpctl.render.svg import Part, picture_file, stacked
from mpctl.render.svg_grid import GridPicture
from mpctl.render.svg_timeline import WIDTH, StepPicture, legend

CELL, HIGH, SPACE, HEAD = 56, 36, 4, 22
TILE_WIDTH, TILE_HEIGHT = 72, 30
COLOURS, LINE = 8, 150  # colours of cells; characters of a line

TEXTURES = (
    "",
    '<path d="M-1 7 7 -1M3 11 11 3" stroke="#14171b" stroke-opacity=".55" stroke-width="1.4"/>',
    '<circle cx="2" cy="2" r="1.2" fill="#fff"/><circle cx="6" cy="6" r="1.2" fill="#fff"/>',
    '<path d="M1 -1 9 7M-3 3 5 11" stroke="#14171b" stroke-opacity=".55" stroke-width="1.4"/>',
    '<path d="M4 0V8" stroke="#14171b" stroke-opacity=".55" stroke-width="1.4"/>',
    '<path d="M0 4H8" stroke="#14171b" stroke-opacity=".55" stroke-width="1.4"/>',
    '<circle cx="4" cy="4" r="1.4" fill="#14171b" fill-opacity=".7"/>',
)


def textures() -> Raw:
    """The patterns that fill the kinds of work, so that they differ without colour too."""
    return el(
        "defs",
        *(
            el(
                "pattern",
                el("rect", width=8, height=8, style=f"fill:var(--c{at})"),
                Raw(drawn),
                id=f"t{at}",
                width=8,
                height=8,
                patternUnits="userSpaceOnUse",
            )
            for at, drawn in enumerate(TEXTURES)
        ),
    )


def plan_svg(plan: Plan, topology: Topology) -> str:
    """The whole file: headline, layout and, where the step can be timed, its timeline."""
    part = stacked(_parts(plan, topology))
    return picture_file(_headline(plan, topology), part, WIDTH, defs=textures())


def _parts(plan: Plan, topology: Topology) -> Iterator[Part]:
    yield el("text", _headline(plan, topology), y=18, class_="head"), 26
    yield el("text", verdict(plan), y=14), 18
    if plan.job.model is not None:
        yield el("text", training_line(training_settings(plan.job)), y=12, class_="dim"), 22
    drawn = boxes(topology)
    is_tiled = drawn[0].number is None
    yield _map(plan, topology, drawn, DENSE_CELLS)
    for line in wrap(links_text(plan, topology), LINE):
        yield el("text", line, y=12, class_="dim"), 18
    what = "its first node (n), coloured by stage" if is_tiled else "rank and tp group"
    places = "dp (d), pp (p) and cp (c)" if topology.sizes["cp"] > 1 else "dp (d) and pp (p)"
    note = f"a cell: {what}; below it its {places} place"
    yield el("text", note, y=12, class_="dim"), 30
    yield from _experts(plan, topology, drawn)
    yield from _grid(plan, topology)
    if plan.estimate is not None:
        yield from _timeline(plan, find_step_line(plan.estimate.layout))


class Cells(NamedTuple):
    """How cells are drawn. group: the kind of group whose letter they have; colour: of a single
    rank, by group or by the place along this axis; of tiles of nodes, by the place of the first
    rank."""

    group: str
    colour: str
    of_tiles: str
    below: Callable[[Topology, range], str]


DENSE_CELLS = Cells("tp", "", "pp", coordinates_text)
EXPERT_CELLS = Cells("etp_ep", "ep", "ep", experts_text)
SHOWN_HOMES, HOMES_IN_A_ROW = 16, 4


def _map(plan: Plan, topology: Topology, drawn: list[Box], cells: Cells) -> Part:
    if drawn[0].number is None:
        return _tiles(plan, topology, drawn[0], cells)
    return _nodes(plan, topology, drawn, cells)


def _experts(plan: Plan, topology: Topology, drawn: list[Box]) -> Iterator[Part]:
    """The ranks again, as the experts see them, and which experts each place along ep holds."""
    if not expert_axes(topology):
        return
    title = f"Experts: {expert_axes_text(plan.job)}, order {'-'.join(topology.views[0].order)}"
    yield el("text", title, y=14, class_="title"), 26
    yield _map(plan, topology, drawn, EXPERT_CELLS)
    note = f"ranks of one ep hold the same experts of their stage's layers (ep modulo {COLOURS} is "
    note += "the colour); the letter is the group in which tokens are sent to them"
    yield el("text", note, y=12, class_="dim"), 20
    homes = list(expert_homes(plan.job))
    for first in range(0, min(len(homes), SHOWN_HOMES), HOMES_IN_A_ROW):
        row = list(enumerate(homes))[first : min(first + HOMES_IN_A_ROW, SHOWN_HOMES)]
        yield join([_home(at, held, WIDTH / HOMES_IN_A_ROW * (at - first)) for at, held in row]), 18
    if len(homes) > SHOWN_HOMES:
        more = f"and so on to ep {len(homes) - 1}, {plural(len(homes[0]), 'expert')} each"
        yield el("text", more, y=12, class_="dim"), 18
    yield Raw(), 12


def _home(at: int, held: range, x: float) -> Raw:
    swatch = el("path", d="M0 2h18v12h-18z", class_=f"cell g{at % COLOURS}")
    text = f"ep {at}: experts {span_text(held.start, held.stop - 1)}"
    inside = join([swatch, el("text", text, x=24, y=13)])
    return el("g", inside, transform=f"translate({number(x)} 0)")


def _grid(plan: Plan, topology: Topology) -> Iterator[Part]:
    """The grid of the tp ranks of a mode other than 1d."""
    picture = GridPicture.find(plan, topology, WIDTH)
    if picture is None:
        return
    yield el("text", picture.label, y=14, class_="title"), 26
    drawn, height = picture.draw()
    yield drawn, height + 8
    for colour, text in picture.legend():
        swatch = el("path", d="M0 2h18v12h-18z", class_=f"cell g{colour}")
        yield join([swatch, el("text", text, x=24, y=13)]), 18
    yield Raw(), 12


def _timeline(plan: Plan, step: StepLine | str) -> Iterator[Part]:
    """The step's timeline with its legend, or why there is none."""
    if isinstance(step, str):
        yield el("text", f"No timeline: {step}", y=12, class_="dim"), 20
        return
    picture = StepPicture.of(step)
    yield el("text", timeline_title(plan, step), y=14, class_="title"), 26
    yield el("g", legend(step)), 22
    yield picture.draw(), picture.height


def _headline(plan: Plan, topology: Topology) -> str:
    name = model_name(plan.job)
    headline = f"{placement_text(plan)}, {dense_sizes_text(plan.job)}"
    return f"{name}: {headline}" if name else headline


def timeline_title(plan: Plan, step: StepLine) -> str:
    """`1f1b of 8 micro batches on 4 stages, 2 chunks a stage: 1.84 s`."""
    p, m = plan.job.parallel, step.microbatches
    chunks = f", {p.vpp} chunks a stage" if p.vpp > 1 else ""
    batches = plural(m, "micro batch", "micro batches")
    schedule = f"{p.schedule} of {batches} on {plural(p.pp, 'stage')}{chunks}"
    return f"{schedule}: {seconds_text(step.seconds)}"


def _nodes(plan: Plan, topology: Topology, drawn: list[Box], cells: Cells) -> Part:
    wide = min(topology.gpus_per_node, 8)
    rows = -(-topology.gpus_per_node // wide)
    width, height = wide * (CELL + SPACE) + 12, rows * (HIGH + SPACE) + HEAD + 8
    pieces = [
        Drawn(box.cells[0][0], _node(plan, topology, box, cells, width, height, wide), width, height) for box in drawn
    ]
    levels = framed_levels(plan, topology, topology.gpus_per_node)
    picture = nested(levels, pieces, WIDTH)
    return picture.drawn, picture.height + 16


def _node(plan: Plan, topology: Topology, box: Box, cells: Cells, width: float, height: float, wide: int) -> Raw:
    drawn = [
        _cell(topology, cell, cells, 6 + at % wide * (CELL + SPACE), HEAD + at // wide * (HIGH + SPACE), CELL, HIGH)
        for at, cell in enumerate(box.cells)
    ]
    frame = el("rect", width=width, height=height, rx=6, class_="box")
    return join([frame, el("text", node_title(plan, topology, box), x=8, y=15), *drawn])


def node_title(plan: Plan, topology: Topology, box: Box) -> str:
    """`node 0 · layers 0-5`: with the layers of all its stages."""
    layers = node_layers(plan, topology, (cell[0] for cell in box.cells))
    return f"node {box.number}" + (f" · {layers}" if layers else "")


def _tiles(plan: Plan, topology: Topology, box: Box, cells: Cells) -> Part:
    if levels := framed_levels(plan, topology, len(box.cells[0])):
        pieces = [
            Drawn(cell[0], _cell(topology, cell, cells, 0, 0, TILE_WIDTH, TILE_HEIGHT), TILE_WIDTH, TILE_HEIGHT)
            for cell in box.cells
        ]
        picture = nested(levels, pieces, WIDTH)
        return picture.drawn, picture.height + 16
    columns = WIDTH // (TILE_WIDTH + SPACE)
    drawn = [
        _cell(
            topology,
            cell,
            cells,
            at % columns * (TILE_WIDTH + SPACE),
            at // columns * (TILE_HEIGHT + SPACE),
            TILE_WIDTH,
            TILE_HEIGHT,
        )
        for at, cell in enumerate(box.cells)
    ]
    return join(drawn), -(-len(drawn) // columns) * (TILE_HEIGHT + SPACE) + 6


def _cell(topology: Topology, ranks: range, cells: Cells, x: float, y: float, width: float, height: float) -> Raw:
    group, middle = group_number(topology, ranks[0], (cells.group,)), x + width / 2
    head = cell_label(topology, ranks) + (f" {letters(group)}" if len(ranks) == 1 else "")
    axis = cells.colour if len(ranks) == 1 else cells.of_tiles
    colour = topology.view_of(axis).coords(ranks[0])[axis] if axis else group
    below = cells.below(topology, ranks)
    anchor = {"text_anchor": "middle", "class_": "on-cell"}
    size = "font-size:10px" if len(below) > 8 else None
    return el(
        "g",
        el("title", cell_title(topology, ranks)),
        el("rect", x=x, y=y, width=width, height=height, rx=3, class_=f"cell g{colour % COLOURS}"),
        el("text", head, x=number(middle), y=number(y + height * 0.42), **anchor),
        el("text", below, x=number(middle), y=number(y + height * 0.85), style=size, **anchor),
    )


GAP, PAD, TITLE = 10, 8, 22
MOST_FRAMES = 32  # of a level; more are named in words alone


class Drawn(NamedTuple):
    """A drawing of the ranks from `first` on, with its size."""

    first: int
    drawn: Raw
    width: float
    height: float


def framed_levels(plan: Plan, topology: Topology, ranks: int) -> list[LinkLevel]:
    """The levels to frame, outermost first. ranks: of a piece, which no frame may cut."""
    shown = shown_levels(plan.job.cluster, topology)
    networks = [(level, -(-topology.world_size // level.ranks)) for level in shown]
    return [
        level
        for at, (level, count) in enumerate(networks)
        if level.ranks % ranks == 0
        and count <= MOST_FRAMES
        and (count > 1 or (at == 0 and level.ranks > topology.gpus_per_node))
    ][::-1]


def nested(levels: Sequence[LinkLevel], pieces: Sequence[Drawn], width: float) -> Drawn:
    """The pieces in rows, in a frame for each network of the levels, outermost first."""
    if not levels:
        return _flow(pieces, width)
    level, *inner = levels
    groups = groupby(pieces, key=lambda piece: piece.first // level.ranks)
    frames = (_frame(level_title(level, at), nested(inner, list(group), width - 2 * PAD)) for at, group in groups)
    return _flow(list(frames), width)


def level_title(level: LinkLevel, at: int) -> str:
    """`NVLink domain 3` or `pod 1, 1:4 oversubscribed`."""
    return f"{level.name} {at}{over_text(level)}"


def _frame(title: str, inside: Drawn) -> Drawn:
    width = max(inside.width, 7.0 * len(title)) + 2 * PAD
    height = inside.height + TITLE + PAD
    drawn = join(
        [
            el("rect", width=number(width), height=number(height), rx=8, class_="box level"),
            el("text", title, x=PAD, y=15, class_="dim"),
            el("g", inside.drawn, transform=f"translate({PAD} {TITLE})"),
        ]
    )
    return Drawn(inside.first, drawn, width, height)


def _flow(pieces: Sequence[Drawn], width: float) -> Drawn:
    """The pieces from left to right, in as many rows as the width asks for."""
    placed = list(_places(pieces, width))
    drawn = join(el("g", piece.drawn, transform=f"translate({number(x)} {number(y)})") for piece, x, y in placed)
    right = max(x + piece.width for piece, x, _ in placed)
    return Drawn(pieces[0].first, drawn, right, max(y + piece.height for piece, _, y in placed))


def _places(pieces: Sequence[Drawn], width: float) -> Iterator[tuple[Drawn, float, float]]:
    x = y = high = 0.0
    for piece in pieces:
        if x and x + piece.width > width:
            x, y, high = 0.0, y + high + GAP, 0.0
        yield piece, x, y
        x, high = x + piece.width + GAP, max(high, piece.height)
