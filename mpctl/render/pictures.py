"""The files that `mpctl plan` and `mpctl search` write: a page, a picture, a trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from mpctl.core.errors import InputError
from mpctl.core.topology import Topology
from mpctl.plan.planning.plan import Plan, make_plan
from mpctl.render.markup import Progress, Raw, el, no_progress, write_text
from mpctl.render.page import page_file, page_text
from mpctl.render.parts import Part
from mpctl.render.plan import PlanView, plan_parts
from mpctl.render.plan_map import layout_data
from mpctl.render.plan_svg import plan_svg, textures
from mpctl.render.search import front_points, search_parts

if TYPE_CHECKING:
    from mpctl.plan.planning.whole_run import WholeRun
    from mpctl.plan.search.document import SearchDocument
    from mpctl.plan.search.result import SearchResult


def write_pictures(
    plan: Plan,
    topology: Topology,
    *,
    command: str,
    html: Path | None = None,
    svg: Path | None = None,
    trace: Path | None = None,
    run: WholeRun | None = None,
    on_progress: Progress = no_progress,
) -> None:
    """Write the files that are named: page, picture, trace.

    command: the line that makes the plan again; run: for the page; on_progress: called with
    (picture, parts done, parts). Raises InputError where a file cannot be written, or the step
    cannot be timed.
    """
    if html is not None:
        line = f"{command} --html {quote(str(html))}"
        page = plan_page(plan, topology, command=line, run=run, on_progress=on_progress)
        write_text(html, page, option="--html")
    if svg is not None:
        on_progress("drawing", 0, 1)
        write_text(svg, plan_svg(plan, topology), option="--svg")
    if trace is not None:
        on_progress("trace", 0, 1)
        write_text(trace, _trace(plan, topology), option="--trace")


def _trace(plan: Plan, topology: Topology) -> str:
    from mpctl.plan.estimate.timeline import find_step_line
    from mpctl.render.trace import trace_text

    if plan.estimate is None:
        raise InputError.of("no-timeline", "--trace", "a layout without a model has no step", "name one by --model")
    step = find_step_line(plan.estimate.layout)
    if isinstance(step, str):
        raise InputError.of("no-timeline", "--trace", f"the step has no times: {step}", "name a cluster preset")
    return trace_text(step, total=plan.estimate.step_seconds, contention=plan.estimate.contention)


def write_search_page(
    path: Path, result: SearchResult, document: SearchDocument, *, command: str, on_progress: Progress = no_progress
) -> None:
    """Write the page of a search's answer and of its best layout's plan.

    command: the line that makes the search again. Raises InputError where path cannot be written.
    """
    assert result.best is not None, "a page shows a layout"
    plan = make_plan(result.best.job)
    search = list(search_parts(document, front_points(result)))
    page = plan_page(plan, plan.require_legal(), command=command, search=search, on_progress=on_progress)
    write_text(path, page, option="--html")


SECTIONS = 6  # of the page of a plan with a model


def plan_page(
    plan: Plan,
    topology: Topology,
    *,
    command: str,
    search: Sequence[Part] = (),
    run: WholeRun | None = None,
    on_progress: Progress = no_progress,
) -> str:
    """The page as HTML. command: the line that makes it again. search: the parts of the search that found
    the layout; on_progress: called with ("page", sections done, sections)."""
    # numbers for the script, which never contain `<`
    data = json.dumps(layout_data(plan, topology), separators=(",", ":")).replace("<", "\\u003c")
    return page_text(
        plan_parts(plan, topology, PlanView(run=run, search=search, is_page=True)),
        command=command,
        before=el("svg", textures(), width=0, height=0, aria_hidden="true", class_="defs"),
        data=el("script", Raw(data), type="application/json", id="data"),
        script=page_file("page.js"),
        sections=SECTIONS + (run is not None) + bool(search),
        on_progress=on_progress,
    )
