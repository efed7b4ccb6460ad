"""What a rank of each stage holds, as bars under the limit of its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpctl.plan import Plan
from mpctl.render.cells import layers_text
from mpctl.render.html.parts import Share, bar, details, legend, note, section, table
from mpctl.render.markup import Raw, el
from mpctl.units import bytes_text, count_text

if TYPE_CHECKING:
    from mpctl.estimate.memory import StageMemory

# Fields of StageMemory that add up to its total, and what a reader calls them.
PARTS = {
    "parameter_bytes": "weights", "gradient_bytes": "gradients", "optimizer_bytes": "optimizer",
    "activation_bytes": "activations", "working_bytes": "working", "lasting_bytes": "lasting",
}  # fmt: skip
SHOWN, NEAR = 64, 4


def memory_section(plan: Plan, stages: Sequence[StageMemory]) -> Raw:
    device = plan.job.cluster.device
    limit = device.memory_bytes if device else None
    heaviest = max(stage.total_bytes for stage in stages)
    is_near = limit is not None and heaviest > limit / NEAR
    whole = 1.04 * max(heaviest, limit if is_near and limit else 0)
    drawn = limit if is_near else None
    rows = [_row(stage, whole, drawn) for stage in stages[:SHOWN]]
    more = f" {len(stages) - SHOWN} more stages in the table." * (len(stages) > SHOWN)
    return section(
        "memory", "Memory of one rank, by stage", legend(PARTS.values()),
        el("ul", *rows, class_="bars"), note(_limit(limit, heaviest, is_near), more),
        details("Memory as a table", _table(plan, stages)),
    )  # fmt: skip


def _limit(limit: int | None, heaviest: int, is_drawn: bool) -> str:
    if limit is None:
        return "No device is named, so there is no limit to draw."
    if not is_drawn:
        return (f"The device's limit, {bytes_text(limit)}, lies {limit / heaviest:,.0f} times as "
                "far as the longest bar.")  # fmt: skip
    verdict = "fits under" if heaviest <= limit else "exceeds"
    return (f"The line is the device's {bytes_text(limit)}; the heaviest stage's "
            f"{bytes_text(heaviest)} {verdict} it.")  # fmt: skip


def _shares(stage: StageMemory) -> list[Share]:
    sizes = ((name, getattr(stage, key)) for key, name in PARTS.items())
    return [Share(name, size, bytes_text(size)) for name, size in sizes]


def _row(stage: StageMemory, whole: float, limit: int | None) -> Raw:
    is_over = limit is not None and stage.total_bytes > limit
    total = bytes_text(stage.total_bytes) + (" ✗ over" if is_over else "")
    return el("li", el("span", f"stage {stage.stage}"),
              bar(_shares(stage), whole, limit=limit), el("span", total))  # fmt: skip


def _table(plan: Plan, stages: Sequence[StageMemory]) -> Raw:
    spans = plan.stages or ()
    rows = [
        (f"stage {s.stage}", layers_text(spans[s.stage]) if spans else "", count_text(s.parameters),
         *(share.text for share in _shares(s)), bytes_text(s.total_bytes))
        for s in stages
    ]  # fmt: skip
    columns = ("stage", "layers", "parameters", *PARTS.values(), "total")
    return table("Bytes on one rank of each stage", columns, rows, left=2)
