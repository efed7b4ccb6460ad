"""The plan as people read it: verdict and main figures first, then layout, traffic, memory, time.

What repeats is folded: nodes, groups and stages that look alike stand once, and checks that passed
by name. `--full` prints all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from mpctl.planning.plan import Plan
from mpctl.planning.summary import (
    main_figures,
    model_name,
    model_text,
    order_text,
    placement_text,
    sizes_text,
    training_text,
    verdict,
)
from mpctl.render.console import NamedRows, get_console, plain_table
from mpctl.render.fold import members_text, span_text, stage_layers_text
from mpctl.render.plan_grid import grid_part
from mpctl.render.plan_layout import groups_part, nodes_part, ranks_part
from mpctl.render.plan_stages import stages_part
from mpctl.rules.check import Check
from mpctl.topology import Topology
from mpctl.units import seconds_text

if TYPE_CHECKING:
    from mpctl.estimate.step import StepTime
    from mpctl.planning.schemas import RankDocument

MARKS = {"ok": ("✓", "green"), "warning": ("!", "bold yellow"), "error": ("✗", "bold red")}
FITS = {True: ("✓ ", "bold green"), False: ("✗ ", "bold red"), None: ("", "bold")}


def print_plan(
    plan: Plan, topology: Topology, *, kinds: tuple[str, ...] | None, ranks: bool,
    full: bool = False,
) -> None:  # fmt: skip
    """Print the whole plan on stdout.

    kinds: list every group of these kinds; None: the first groups of each kind. ranks: list every
    rank. full: fold nothing.
    """
    get_console().print(*_paragraphs(plan, topology, kinds, ranks, full), sep="\n")


def _paragraphs(
    plan: Plan, topology: Topology, kinds: tuple[str, ...] | None, ranks: bool, full: bool
) -> Iterator[RenderableType]:
    yield _headline(plan, topology)
    yield NamedRows(_facts(plan))
    yield from _warnings(plan)
    yield Text("")
    yield from nodes_part(plan, topology, full=full)
    yield from grid_part(plan, topology)
    yield from groups_part(topology, kinds, full=full)
    if ranks:
        yield ranks_part(plan, topology)
    if plan.estimate is not None:
        yield from stages_part(plan.estimate, topology, full=full)
        yield from _time_part(plan.estimate.time)
    yield from _checks(plan, full=full)


def _headline(plan: Plan, topology: Topology) -> Text:
    """The model and its layout, and whether it fits."""
    name, sizes = model_name(plan.job), sizes_text(plan.job)
    mark, style = FITS[plan.fits]
    title = f"{name}: {sizes}" if name else sizes
    return Text.assemble((title, "bold"), "\n", (f"{mark}{verdict(plan)}", style))


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Layout, model, training and the main figures, as name and text."""
    yield "layout", f"{placement_text(plan)}; {order_text(plan)}"
    if plan.estimate is None:
        return
    yield "model", model_text(plan.estimate)
    yield "training", training_text(plan.job)
    yield from main_figures(plan)


def _warnings(plan: Plan) -> Iterator[Text]:
    """Every check that did not pass, with its hint; of memory the hint alone, below the verdict."""
    for check in plan.checks:
        if check.rule == "memory-fits" and check.status != "ok":
            yield Text(f"→ {check.hint}")
        elif check.status != "ok":
            mark, style = MARKS[check.status]
            yield Text.assemble(
                (f"{mark}  ", style), (f"{check.rule}: ", "bold"), _check_text(check)
            )


def _check_text(check: Check) -> str:
    return check.message + (f" → {check.hint}" if check.hint else "")


def _time_part(time: StepTime | str) -> Iterator[Text]:
    """The step's seconds by part, and why they may be wrong."""
    if isinstance(time, str):
        return
    parts = time.parts().items()
    shown = ", ".join(f"{name} {seconds_text(value)}" for name, value in parts if value)
    yield Text.assemble(("\nStep time ", "bold"), (seconds_text(time.total), "bold"), f": {shown}")
    if time.extrapolates:
        yield Text(f"extrapolated: {'; '.join(time.extrapolates)}", "yellow")


def _checks(plan: Plan, *, full: bool) -> Iterator[RenderableType]:
    if full:
        table = plain_table("\nChecks", ("", "rule", "answer"), left=("", "rule", "answer"))
        for check in plan.checks:
            mark, style = MARKS[check.status]
            table.add_row(Text(mark, style=style), check.rule, Text(_check_text(check)))
        yield table
        return
    passed = [check.rule for check in plan.checks if check.status == "ok"]
    mark, style = MARKS["ok"]
    yield Text.assemble(
        ("\nChecks passed ", "bold"), (f"{mark} ", style), f"{', '.join(passed)}",
        ("   (--full: what each found)", "dim"),
    )  # fmt: skip


def print_rank(document: RankDocument) -> None:
    """One rank on stdout: its node and coordinates, its layers, and the groups that it is in."""
    console = get_console()
    coords = ", ".join(f"{axis} {index}" for axis, index in document["coords"].items())
    console.print(
        Text.assemble(
            (f"rank {document['rank']}", "bold"),
            f" of {document['world_size']}: node ",
            f"{document['node']}, local rank {document['local_rank']}; {coords}",
        )
    )
    if "layers" in document:
        console.print(f"layers {stage_layers_text(document['layers'], document.get('stacks'))}")
    for tensor, parts in document.get("tensor_blocks", {}).items():
        spans = (f"{dim} {span_text(first, stop - 1)}" for dim, (first, stop) in parts.items())
        console.print(f"{tensor}: {', '.join(spans)}")
    table = plain_table("", ("group", "size", "members"), left=("group", "members"))
    for kind, group in document["groups"].items():
        table.add_row(kind, str(len(group)), members_text(group, whole=True))
    console.print(table)
