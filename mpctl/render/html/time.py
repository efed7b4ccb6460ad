"""The time of a step by what it goes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpctl.planning.document import TIME_PARTS
from mpctl.planning.plan import Plan
from mpctl.planning.summary import plan_summary, rates
from mpctl.render.html.parts import Share, bar, legend, note, section, table
from mpctl.render.markup import Raw, el
from mpctl.units import seconds_text

if TYPE_CHECKING:
    from mpctl.estimate.time import StepTime

MEANS = {
    "compute": "matrix products, attention and element-wise kernels",
    "bubble": "waiting for other stages",
    "tp": "messages of tensor parallelism", "cp": "messages of context parallelism",
    "dp": "gradients over the replicas that no computation hides",
    "pp": "messages between stages", "optimizer": "reading and writing the optimizer's states",
    "other": "launching kernels, where it takes longer than they do",
}  # fmt: skip


def time_section(plan: Plan, time: StepTime | str) -> Raw:
    if isinstance(time, str):
        return section("time", "Step time", note(f"Not estimated: {time}."))
    parts = [(name, value) for name in TIME_PARTS if (value := float(getattr(time, name)))]
    shares = [Share(name, value, seconds_text(value)) for name, value in parts]
    rows = [
        (name, MEANS.get(name, ""), seconds_text(value), f"{value / time.total:.1%}")
        for name, value in parts
    ]
    between = f"{seconds_text(time.low)} to {seconds_text(time.high)}"
    rate = "; ".join(f"{name} {text}" for name, text in rates(plan_summary(plan)))
    return section(
        "time", "Step time",
        el("p", el("strong", seconds_text(time.total)), 
           f" a step (9 of 10 runs: {between}). {rate}."),
        note(f"Extrapolated: {'; '.join(time.extrapolates)}.") if time.extrapolates else "",
        legend(name for name, _ in parts),
        el("div", bar(shares, time.total), class_="one"),
        table("Step time by part", ("part", "what", "seconds", "share"), rows, left=2),
    )  # fmt: skip
