"""The grid of tensor-parallel ranks in the section "Layout": its axes, a picture, every block."""

from __future__ import annotations

from mpctl.axes import GRID_AXES
from mpctl.planning.plan import Plan
from mpctl.planning.tensor_modes import rank_blocks
from mpctl.render.html.parts import details, note, scrolling, table
from mpctl.render.markup import Raw, el, number
from mpctl.render.svg_grid import GridPicture
from mpctl.topology import Topology

WIDTH, LISTED = 1000.0, 64


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
    rows = [
        (name, known[name].splits, known[name].sends, str(topology.sizes[name]))
        for name in topology.parts["tp"]
    ]
    return table("Axes of the grid", ("axis", "cuts", "sends", "ranks"), rows, left=3)


def _figure(picture: GridPicture | None) -> list[Raw]:
    if picture is None:
        return [note("The grid has too many ranks to be drawn.")]
    drawn, height = picture.draw()
    svg = el(
        "svg", el("title", picture.label), drawn, viewBox=f"0 0 {number(WIDTH)} {number(height)}",
        width=number(WIDTH), height=number(height), role="img", aria_label=picture.label,
        class_="grid",
    )  # fmt: skip
    items = (el("li", el("i", class_=f"g{colour}"), text) for colour, text in picture.legend())
    return [
        el("figure", scrolling(svg, picture.label),
           el("ul", *items, class_="legend cells", aria_label="Legend"),
           el("figcaption", f"{picture.label}. {_matrices(picture)}")),
    ]  # fmt: skip


def _matrices(picture: GridPicture) -> str:
    if not picture.blocks:
        return ""
    rank = picture.ranks[picture.marked]
    return f"Below it Y = X W of an MLP, of one micro batch, and the blocks that rank {rank} holds."


def _blocks_table(plan: Plan, topology: Topology) -> list[Raw]:
    """The blocks of the ranks of the first tp group."""
    ranks = topology.group(0, "tp")[:LISTED]
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
