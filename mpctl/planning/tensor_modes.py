"""One job in every tensor mode, side by side: its costs in symbols and its own numbers.

For each number of tensor-parallel ranks: 1d, 2d, 2.5d with each depth from 2 on (grid_depths), 3d.
Everything else of the job stays, but for sequence parallelism, which is 1d's: other modes are
planned without it. A mode that the rules refuse is told with their reason.

By hand, tp 8: 1d, 2d (refused: no square), 2.5d of depth 2, 3d.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from mpctl.errors import InputError, Issue
from mpctl.planning.plan import Overrides, Plan, load_plan
from mpctl.planning.tensor_costs import COLUMNS, COSTS, NOTES, grid_sizes
from mpctl.planning.training import training_settings
from mpctl.spec.load import load_partial, require_job
from mpctl.spec.parallel import TensorMode
from mpctl.tensor_grid import TensorGrid, grid_axes, grid_depths

if TYPE_CHECKING:
    from mpctl.estimate.job import Estimate
    from mpctl.planning.tensor_schemas import (
        CostEntry,
        ModeLayerEntry,
        ModeStepEntry,
        TensorModeEntry,
        TensorModesDocument,
    )
    from mpctl.spec.job import JobSpec

Settings = dict[str, object]


def mode_choices(tp: int) -> list[tuple[TensorMode, int | None]]:
    """Tensor modes of so many ranks with their depths; one that has no grid comes once as well.

    >>> mode_choices(8), mode_choices(6)[2:]
    ([('1d', None), ('2d', None), ('2.5d', 2), ('3d', None)], [('2.5d', None), ('3d', None)])
    """
    depths = [d for d in grid_depths(tp) if d > 1]
    own: Mapping[str, Sequence[int | None]] = {"2.5d": depths or [None]}
    modes: tuple[TensorMode, ...] = get_args(TensorMode)
    return [(mode, depth) for mode in modes for depth in own.get(mode, [None])]


def same_as_2d(tp: int, mode: str, depth: int | None, where: str) -> Issue | None:
    """Why a mode is not compared: 2.5d of depth 1 is exactly 2d. where: of the issue."""
    axes = grid_axes(mode, tp, depth)
    if axes and axes.get("depth") == 1:
        message = f"{tp} ranks are one layer of 2.5d, which is 2d"
        return Issue("tensor-mode", where, message, "use d q^2 ranks with d at least 2")
    return None


def tensor_modes_document(
    source: str | None, overrides: Overrides, sizes: Sequence[int] = ()
) -> TensorModesDocument:
    """The comparison as JSON. source, overrides: a job as for load_plan; sizes: numbers of
    tensor-parallel ranks, that of the job by default.

    Raises InputError where the job cannot be read or names no model, and with the reasons of all
    modes where none can run.
    """
    job = require_job(load_partial(source, overrides))
    if job.model is None:
        hint = "name a job with a model, or a model: --model gpt2"
        raise InputError.of("no-model", "model", "a comparison of tensor modes needs one", hint)
    entries = [
        _entry(source, overrides, job, tp, mode, depth)
        for tp in sizes or [job.parallel.tp]
        for mode, depth in mode_choices(tp)
    ]
    if not any(entry["layer"] for entry in entries):
        raise InputError(dict.fromkeys(Issue(**i) for e in entries for i in e["issues"]))
    return {
        "schema": "mpctl.tensor-modes/1",
        "job": job.name or source,
        "training": training_settings(job),
        "columns": COLUMNS,
        "changed": ["parallel.sequence_parallel"] if job.parallel.sequence_parallel else [],
        "modes": entries,
        "notes": list(NOTES),
    }


def mode_settings(job: JobSpec, tp: int, mode: str, depth: int | None) -> Settings:
    """The settings that give a job this tensor mode; replicas are what other ranks leave."""
    settings: Settings = {"parallel.tensor_mode": mode, "parallel.tensor_depth": depth}
    if tp != job.parallel.tp:
        settings |= {"parallel.tp": tp, "parallel.dp": None}
    if mode != "1d":
        settings["parallel.sequence_parallel"] = False
    return settings


def _entry(
    source: str | None, overrides: Overrides, job: JobSpec, tp: int, mode: str, depth: int | None
) -> TensorModeEntry:
    axes = grid_axes(mode, tp, depth)
    entry: TensorModeEntry = {
        "tp": tp, "mode": mode, "depth": depth or (axes or {}).get("depth"), "axes": axes,
        "costs": dict(_costs(mode, axes)), "issues": [], "layer": None, "step": None,
    }  # fmt: skip
    try:
        plan = load_plan(source, {**overrides, **mode_settings(job, tp, mode, depth)})
    except InputError as error:
        entry["issues"] = [issue.as_dict() for issue in error.issues]
        return entry
    if issue := same_as_2d(tp, mode, depth, "parallel.tp"):
        entry["issues"] = [issue.as_dict()]
        return entry
    assert plan.estimate is not None, "the job has a model"
    entry["layer"] = _layer(plan.estimate)
    entry["step"] = _step(plan, plan.estimate)
    return entry


def _costs(mode: str, axes: dict[str, int] | None) -> Iterator[tuple[str, CostEntry]]:
    sizes = grid_sizes(TensorGrid(mode, axes)) if axes else None
    for name, cost in COSTS[mode].items():
        yield name, {"symbol": cost.symbol, "value": cost.value(sizes) if sizes else None}


def _layer(estimate: Estimate) -> ModeLayerEntry:
    from mpctl.planning.layer_figures import layer_figures

    own = layer_figures(estimate.layout)
    return {
        "flops": own.flops, "parameter_bytes": own.parameter_bytes,
        "saved_bytes": own.saved_bytes, "sent_bytes": own.sent_bytes,
        "collectives": own.collectives, "hops": own.hops, "tensor_seconds": own.tensor_seconds,
    }  # fmt: skip


def _step(plan: Plan, estimate: Estimate) -> ModeStepEntry:
    from mpctl.planning.layer_figures import sent_bytes

    layout, time = estimate.layout, estimate.time
    kinds = {"tp", *layout.grid.groups}
    sent = (
        sent_bytes((m for m in stage if m.axis in kinds), layout.group_sizes)
        for stage in estimate.messages
    )
    return {
        "sent_bytes": max(sent),
        "tensor_seconds": None if isinstance(time, str) else time.tp,
        "step_seconds": estimate.step_seconds,
        "peak_bytes": estimate.fullest_stage.device_bytes,
        "fits": plan.fits,
    }
