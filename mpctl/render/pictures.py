"""The files that `mpctl plan` writes beside its answer: a page, a picture, a trace."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from mpctl.errors import InputError
from mpctl.planning.plan import Plan
from mpctl.render.markup import Progress, no_progress, write_text
from mpctl.topology import Topology


def write_pictures(
    plan: Plan, topology: Topology, *, command: str, html: Path | None = None,
    svg: Path | None = None, trace: Path | None = None, on_progress: Progress = no_progress,
) -> None:  # fmt: skip
    """Write the files that are named: page, picture, trace.

    command: the line that makes the plan again; on_progress: called with (picture, parts done,
    parts). Raises InputError where a file cannot be written, or the step cannot be timed.
    """
    if html is not None:
        from mpctl.render.html.page import plan_page

        line = f"{command} --html {quote(str(html))}"
        write_text(
            html, plan_page(plan, topology, command=line, on_progress=on_progress), option="--html"
        )
    if svg is not None:
        from mpctl.render.plan_svg import plan_svg

        on_progress("drawing", 0, 1)
        write_text(svg, plan_svg(plan, topology), option="--svg")
    if trace is not None:
        on_progress("trace", 0, 1)
        write_text(trace, _trace(plan, topology), option="--trace")


def _trace(plan: Plan, topology: Topology) -> str:
    from mpctl.estimate.timeline import find_step_line
    from mpctl.render.trace import trace_text

    if plan.estimate is None:
        raise InputError.of(
            "no-timeline", "--trace", "a layout without a model has no step", "name one by --model"
        )
    step = find_step_line(plan.estimate.layout)
    if isinstance(step, str):
        raise InputError.of(
            "no-timeline", "--trace", f"the step has no times: {step}", "name a cluster preset"
        )
    return trace_text(step, total=plan.estimate.step_seconds, contention=plan.estimate.contention)
