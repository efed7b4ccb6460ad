"""What a rank of each stage holds, as bars under the limit of its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpctl.planning.plan import Plan
from mpctl.render.fold import layers_text
from mpctl.render.html.parts import Share, bar, details, legend, note, section, table
from mpctl.render.markup import Raw, el
from mpctl.units import bytes_text, count_text, plural

if TYPE_CHECKING:
    from mpctl.estimate.memory import StageMemory

# Fields of StageMemory that add up to what the device shows, and what a reader calls them.
PARTS = {
    "parameter_bytes": "weights", "gradient_bytes": "gradients", "optimizer_bytes": "optimizer",
    "activation_bytes": "activations", "working_bytes": "temporary", "lasting_bytes": "software",
    "slack_bytes": "reserve", "context_bytes": "libraries",
}  # fmt: skip
MEANS = (
    "Temporary: what exists only while a layer is computed or a message is sent. Software: buffers "
    "that the training software keeps. Reserve: what the allocator holds beyond that. Libraries: "
    "the context of the device's own libraries. The first six are allocated by tensors."
)
SHOWN, ENDS, NEAR = 16, (8, 4), 4


def memory_section(plan: Plan, stages: Sequence[StageMemory]) -> Raw:
    """The section "Memory": a bar for each stage under the device's memory less headroom, and all
    sizes as a table."""
    limit = plan.job.cluster.usable_bytes
    heaviest = max(stage.device_bytes for stage in stages)
    is_near = limit is not None and heaviest > limit / NEAR
    whole = 1.04 * max(heaviest, limit if is_near and limit else 0)
    drawn = limit if is_near else None
    rows = [_row(stage, whole, drawn) for stage in _drawn(stages)]
    left_out = len(stages) - len(rows)
    more = f" {plural(left_out, 'more stage')} in the table." if left_out else ""
    return section(
        "memory",
        "Memory of one rank, by stage",
        legend(PARTS.values()),
        el("ul", *rows, class_="bars"),
        note(_limit(limit, heaviest, is_near), more),
        note(MEANS),
        details("Memory as a table", _table(plan, stages)),
    )


def _drawn(stages: Sequence[StageMemory]) -> list[StageMemory]:
    """All of a few stages; of many the first, the last and the fullest."""
    if len(stages) <= SHOWN:
        return list(stages)
    fullest = max(stages, key=lambda stage: stage.device_bytes).stage
    front, back = ENDS
    shown = {*range(front), fullest, *range(len(stages) - back, len(stages))}
    return [stages[stage] for stage in sorted(shown)]


def _limit(limit: int | None, heaviest: int, is_drawn: bool) -> str:
    if limit is None:
        return "No device is named, so there is no limit to draw."
    if not is_drawn:
        times = f"{limit / heaviest:,.0f} times what the fullest rank needs"
        return f"A job may take {bytes_text(limit)}, {times}, so the limit is not drawn."
    verdict = "fits" if heaviest <= limit else "does not fit"
    return (f"The dashed line is the device's memory less headroom, {bytes_text(limit)}: the "
            f"fullest rank's {bytes_text(heaviest)} {verdict}.")  # fmt: skip


def _shares(stage: StageMemory) -> list[Share]:
    sizes = ((name, getattr(stage, key)) for key, name in PARTS.items())
    return [Share(name, size, bytes_text(size)) for name, size in sizes]


def _row(stage: StageMemory, whole: float, limit: int | None) -> Raw:
    is_over = limit is not None and stage.device_bytes > limit
    total = bytes_text(stage.device_bytes) + (" ✗ over" if is_over else "")
    return el("li", el("span", f"stage {stage.stage}"),
              bar(_shares(stage), whole, limit=limit), el("span", total))  # fmt: skip


def _table(plan: Plan, stages: Sequence[StageMemory]) -> Raw:
    spans = plan.stages or ()
    rows = [
        (f"stage {s.stage}", layers_text(spans[s.stage]) if spans else "", count_text(s.parameters),
         *(share.text for share in _shares(s)), bytes_text(s.allocated_bytes),
         bytes_text(s.device_bytes))
        for s in stages
    ]  # fmt: skip
    columns = ("stage", "layers", "parameters", *PARTS.values(), "allocated", "on the device")
    return table("Bytes on one rank of each stage", columns, rows, left=2)
