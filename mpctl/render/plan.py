"""The plan as people read it: whether it fits and by how much, memory, time and checks first, then
the layout, its groups and what they send.

What repeats is folded: nodes, groups and stages that look alike stand once, a kind of group is one
line, and checks that passed are counted. `--full` prints all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from mpctl.planning.plan import Plan
from mpctl.planning.runtimes import UnderRuntime, elsewhere_text, is_open, open_text
from mpctl.planning.summary import (
    links_text,
    main_figures,
    model_name,
    model_text,
    order_text,
    placement_text,
    sizes_text,
    training_line,
    training_settings,
    verdict,
)
from mpctl.render.console import NamedRows, get_console, plain_table
from mpctl.render.fold import members_text, span_text, stage_layers_text
from mpctl.render.plan_grid import grid_part
from mpctl.render.plan_layout import groups_part, nodes_part, ranks_part
from mpctl.render.plan_stages import memory_part, traffic_part
from mpctl.render.runtimes import runtimes_table
from mpctl.rules.check import Check
from mpctl.topology import Topology
from mpctl.units import plural, seconds_text

if TYPE_CHECKING:
    from mpctl.planning.document import RankDocument

MARKS = {"ok": ("✓", "green"), "warning": ("!", "bold yellow"), "error": ("✗", "bold red")}
FITS = {True: ("✓ ", "bold green"), False: ("✗ ", "bold red"), None: ("", "bold")}


def print_plan(
    plan: Plan, topology: Topology, *, kinds: tuple[str, ...] | None, ranks: bool,
    full: bool = False, others: Sequence[UnderRuntime] = (), runtimes: Sequence[UnderRuntime] = (),
) -> None:  # fmt: skip
    """Print the whole plan on stdout.

    kinds: list every group of these kinds; None: the first groups of each kind. ranks: list every
    rank. full: fold nothing. others: the layout under other runtimes, to be said in a line;
    runtimes: under those that were asked for, as a table.
    """
    get_console().print(
        *_head(plan, others, runtimes, full=full),
        *_paragraphs(plan, topology, kinds, ranks, full), sep="\n",
    )  # fmt: skip


def _head(
    plan: Plan, others: Sequence[UnderRuntime], runtimes: Sequence[UnderRuntime], *, full: bool
) -> Iterator[RenderableType]:
    """Whether it fits, its figures and what is to be known of them."""
    yield _headline(plan)
    yield NamedRows([*_runtime_rows(plan, others), *_figures(plan, full=full)])
    yield from _warnings(plan)
    if runtimes:
        yield runtimes_table(runtimes)


def _paragraphs(
    plan: Plan, topology: Topology, kinds: tuple[str, ...] | None, ranks: bool, full: bool
) -> Iterator[RenderableType]:
    estimate = plan.estimate
    yield Text("")
    yield NamedRows(_facts(plan, topology))
    if estimate is not None:
        yield memory_part(estimate, full=full)
    yield Text("")
    yield from nodes_part(plan, topology, full=full)
    yield from grid_part(plan, topology)
    yield from groups_part(plan, topology, kinds, full=full)
    if ranks:
        yield ranks_part(plan, topology)
    if estimate is not None:
        yield from traffic_part(estimate, topology)
    if full:
        yield _checks_table(plan)


def _headline(plan: Plan) -> Text:
    """The model and its layout, whether it fits, by how much, and how it is trained."""
    name, sizes = model_name(plan.job), sizes_text(plan.job)
    mark, style = FITS[plan.fits]
    title = f"{name}: {sizes}" if name else sizes
    said = Text.assemble((title, "bold"), "\n", (f"{mark}{verdict(plan)}", style))
    if plan.job.model is not None:
        said.append(f"\n{training_line(training_settings(plan.job))}")
    return said


def _runtime_rows(plan: Plan, others: Sequence[UnderRuntime]) -> Iterator[tuple[str, str]]:
    """Which software the plan is of where nobody named one, and the same layout under others."""
    if not is_open(plan.job) or plan.estimate is None:
        return
    yield "planned for", open_text(plan.job)
    if text := elsewhere_text(others):
        yield "elsewhere", f"{text} (--runtimes all: a table)"


def _figures(plan: Plan, *, full: bool) -> Iterator[tuple[str | Text, str]]:
    """Memory, step time with its parts, speed, and how many checks passed."""
    figures = dict(main_figures(plan))
    if "memory" in figures:
        yield "memory", figures.pop("memory")
    for name, text in figures.items():
        yield name, text
        if name == "step time":
            yield from _parts(plan)
    passed = sum(check.status == "ok" for check in plan.checks)
    others = sum(check.status != "ok" and check.rule != "memory-fits" for check in plan.checks)
    noted = f", {plural(others, 'warning')} below" if others else ""
    where = "" if full else " (--full: what each found)"
    yield "checks", f"✓ {passed} passed{noted}{where}"


def _parts(plan: Plan) -> Iterator[tuple[str | Text, str]]:
    """The step's seconds by part, and why they may be wrong."""
    time = plan.estimate.time if plan.estimate else ""
    if isinstance(time, str):
        return
    parts = time.parts().items()
    yield "parts", ", ".join(f"{name} {seconds_text(value)}" for name, value in parts if value)
    if time.extrapolates:
        yield Text("extrapolated", "yellow"), "; ".join(time.extrapolates)


def _facts(plan: Plan, topology: Topology) -> Iterator[tuple[str, str]]:
    """Layout, links beyond the node and model, as name and text."""
    yield "layout", f"{placement_text(plan)}; {order_text(plan)}"
    if links := links_text(plan, topology):
        yield "links", links
    if plan.estimate is None:
        return
    yield "model", model_text(plan.estimate)


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


def _checks_table(plan: Plan) -> RenderableType:
    table = plain_table("\nChecks", ("", "rule", "answer"), left=("", "rule", "answer"))
    for check in plan.checks:
        mark, style = MARKS[check.status]
        table.add_row(Text(mark, style=style), check.rule, Text(_check_text(check)))
    return table


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
