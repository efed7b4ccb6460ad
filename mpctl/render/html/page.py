"""The page of a plan: one file, readable without its script, its style or colour."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mpctl.core.topology import Topology
from mpctl.core.units import plural
from mpctl.plan.estimate.timeline import find_step_line
from mpctl.plan.planning.plan import Plan
from mpctl.plan.planning.summary import (
    experts_text,
    headline_figures,
    model_name,
    model_text,
    order_text,
    placement_text,
    sizes_text,
    training_line,
    training_settings,
    verdict,
)
from mpctl.render.html.estimate import memory_section, schedule_section, time_section, traffic_section
from mpctl.render.html.frame import page_file, page_text, section, table, tiles
from mpctl.render.html.front import FrontPoint, front_section
from mpctl.render.html.layout import layout_data, layout_section
from mpctl.render.markup import Progress, Raw, el, no_progress
from mpctl.render.plan_svg import textures

if TYPE_CHECKING:
    from mpctl.plan.planning.whole_run import WholeRun
    from mpctl.plan.search.document import SearchDocument

FITS = {True: ("✓ ", "fits"), False: ("✗ ", "over"), None: ("", "unknown")}
SECTIONS = 6  # of a plan with a model
MARKS = {"ok": "✓ ok", "warning": "! warning", "error": "✗ error"}


def plan_page(
    plan: Plan,
    topology: Topology,
    *,
    command: str,
    points: Sequence[FrontPoint] = (),
    search: SearchDocument | None = None,
    run: WholeRun | None = None,
    on_progress: Progress = no_progress,
) -> str:
    """The page as HTML. command: the line that makes it again. run: the run of `--tokens`.

    points, search: where a search was made, the layouts that it estimated and its answer, which
    come first. on_progress: called with ("page", sections done, sections).
    """
    parts = [("Search", front_section(points, search))] if points else []
    if run is not None:
        parts.append(("Run", _run_section(run)))
    before = len(parts)
    for name, part in _sections(plan, topology):
        parts.append((name, part))
        on_progress("page", len(parts), SECTIONS + before)
    title = f"{_name(plan)}: {sizes_text(plan.job)}"
    # numbers for the script, which never contain `<`
    data = json.dumps(layout_data(plan, topology), separators=(",", ":")).replace("<", "\\u003c")
    return page_text(
        title,
        _header(plan, topology),
        parts,
        command=command,
        before=el("svg", textures(), width=0, height=0, aria_hidden="true", class_="defs"),
        data=el("script", Raw(data), type="application/json", id="data"),
        script=page_file("page.js"),
    )


def _sections(plan: Plan, topology: Topology) -> Iterator[tuple[str, Raw]]:
    yield "Layout", layout_section(plan, topology)
    if plan.estimate is not None:
        estimate = plan.estimate
        step = find_step_line(estimate.layout)
        yield "Schedule", schedule_section(plan, step, estimate.step_seconds)
        yield "Memory", memory_section(plan, estimate.memory)
        yield "Time", time_section(plan, estimate.time)
        yield "Traffic", traffic_section(plan, estimate, topology)
    yield "Checks", _checks(plan)


def _run_section(run: WholeRun) -> Raw:
    from mpctl.plan.planning.whole_run import run_figures

    rows = table("Time, cost, failures and saves", ("", ""), [*run_figures(run)], left=2)
    return section("run", "The whole run", rows)


def _name(plan: Plan) -> str:
    return model_name(plan.job) or "A layout"


def _header(plan: Plan, topology: Topology) -> Raw:
    mark, style = FITS[plan.fits]
    return el(
        "header",
        el("h1", el("bdi", _name(plan)), ": ", sizes_text(plan.job)),
        el("p", f"{mark}{verdict(plan)}", class_=f"verdict {style}"),
        *(
            el("p", f"→ {check.hint}.")
            for check in plan.checks
            if check.rule == "memory-fits" and check.status != "ok" and check.hint
        ),
        el("p", training_line(training_settings(plan.job))) if plan.job.model else "",
        el("p", f"{placement_text(plan)}; {order_text(plan)}."),
        *(el("p", f"Experts: {text}.") for text in (experts_text(plan.job),) if text),
        *(el("p", text) for text in _described(plan)),
        tiles(headline_figures(plan)),
    )


def _described(plan: Plan) -> Iterator[str]:
    """The model, and that there are warnings."""
    if plan.estimate is None:
        return
    yield f"Model: {model_text(plan.estimate)}."
    if plan.warnings:
        yield f"{plural(len(plan.warnings), 'warning')}, listed under Checks."


def _checks(plan: Plan) -> Raw:
    rows = [
        (MARKS[check.status], check.rule, check.message + (f" → {check.hint}" * bool(check.hint)))
        for check in sorted(plan.checks, key=lambda check: check.status == "ok")
    ]
    return section("checks", "Checks", table("Every rule and its answer", ("", "rule", "answer"), rows, left=3))
