"""The time of a step by what it goes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpctl.estimate.step import PARTS, StepPart
from mpctl.planning.plan import Plan
from mpctl.planning.summary import plan_summary, rate_figures
from mpctl.render.html.parts import Share, bar, legend, note, section, table
from mpctl.render.markup import Raw, el
from mpctl.units import seconds_text

if TYPE_CHECKING:
    from mpctl.estimate.time import StepTime


def time_section(plan: Plan, time: StepTime | str) -> Raw:
    """The section "Step time": a bar of the step's parts, and each in words and seconds."""
    if isinstance(time, str):
        return section("time", "Step time", note(f"Not estimated: {time}."))
    seconds = time.parts()
    parts = [part for part in PARTS if seconds[part.name]]
    shares = [Share(p.name, seconds[p.name], seconds_text(seconds[p.name])) for p in parts]
    extrapolated = f"Extrapolated: {'; '.join(time.extrapolates)}." if time.extrapolates else ""
    return section(
        "time", "Step time", _headline(plan, time), note(extrapolated) if extrapolated else "",
        legend(part.name for part in parts),
        el("div", bar(shares, time.total), class_="one"),
        _table(parts, shares, time.total),
    )  # fmt: skip


def _headline(plan: Plan, time: StepTime) -> Raw:
    band = f"{seconds_text(time.low)} to {seconds_text(time.high)}"
    rate = "; ".join(f"{name} {text}" for name, text in rate_figures(plan_summary(plan)))
    return el(
        "p", el("strong", seconds_text(time.total)), f" a step (9 of 10 runs: {band}). {rate}."
    )


def _table(parts: Sequence[StepPart], shares: Sequence[Share], total: float) -> Raw:
    rows = [
        (part.name, part.meaning, share.text, f"{share.size / total:.1%}")
        for part, share in zip(parts, shares, strict=True)
    ]
    return table("Step time by part", ("part", "what", "seconds", "share"), rows, left=2)
