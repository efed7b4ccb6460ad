"""The chosen schedule, played with the estimate's seconds: a picture, and what each stage waits."""

from __future__ import annotations

from mpctl.estimate.timeline import StepLine
from mpctl.pipeline.schedule.orders import show
from mpctl.planning.plan import Plan
from mpctl.render.html.parts import details, note, scrolling, section, table
from mpctl.render.markup import Raw, el
from mpctl.render.svg import legend as svg_legend
from mpctl.render.svg import timeline_title
from mpctl.render.svg_timeline import WIDTH, Picture
from mpctl.units import seconds_text

SHOWN_ACTIONS = 12


def schedule_section(plan: Plan, step: StepLine | str | None, total: float | None) -> Raw:
    """The section "Schedule": the timeline of a step and, as a table, what each stage waits.

    step: the played step, or in words why there is none; total: seconds of the whole step.
    """
    if step is None or isinstance(step, str):
        return section("schedule", "Schedule", note(f"Not drawn: {step or 'no model is named'}."))
    picture = Picture.of(step)
    drawn = el(
        "svg", el("title", picture.label), el("g", svg_legend(step)),
        el("g", picture.draw(), transform="translate(0 20)"),
        viewBox=f"0 0 {WIDTH + 2} {picture.height + 20}", role="img", aria_label=picture.label,
        class_="timeline",
    )  # fmt: skip
    return section(
        "schedule", "Schedule", el("p", f"{timeline_title(plan, step)}."),
        scrolling(drawn, "Timeline of the schedule"), note(*_notes(step, picture, total)),
        details("Schedule as a table", _table(step)),
    )  # fmt: skip


def _notes(step: StepLine, picture: Picture, total: float | None) -> list[str]:
    sentences = ["Numbers are micro batches (micro batch.chunk where a stage has several chunks)."]
    if not picture.scale.is_whole:
        sentences.append(
            " The stretch marked … is left out: the stages repeat the same pattern in it."
        )
    if total is not None and total > step.seconds:
        rest = seconds_text(total - step.seconds)
        sentences.append(f" The step ends {rest} later, with gradients over dp and the optimizer.")
    return sentences


def _table(step: StepLine) -> Raw:
    line = step.line
    whole = line.makespan or 1
    rows = [
        (
            f"stage {stage}", show(order[:SHOWN_ACTIONS]) + (" …" * (len(order) > SHOWN_ACTIONS)),
            f"{busy / whole:.1%}", f"{idle / whole:.1%}", in_flight, seconds_text(ends[-1]),
        )
        for stage, (order, busy, idle, in_flight, ends) in enumerate(
            zip(line.orders, line.busy, line.idle, line.in_flight, line.ends, strict=True)
        )
    ]  # fmt: skip
    columns = ("stage", "first actions", "busy", "bubble", "in flight", "ends")
    return table("What each stage does and waits; in flight: micro batches held at once", columns,
                 rows, left=2)  # fmt: skip
