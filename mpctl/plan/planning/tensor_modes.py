"""One job in every tensor mode: costs in symbols, the job's figures, and the blocks of each rank.

For each number of tensor-parallel ranks the comparison has 1d, 2d, 2.5d with each depth from 2 on
(grid_depths) and 3d. The rest of the job stays, except that sequence parallelism exists in 1d only:
other modes are planned without it. A mode that the rules refuse is listed with their reason.

The first five columns of costs are those of Colossal-AI's documentation of 1D, 2D, 2.5D and 3D
tensor parallelism (docs/features, "Efficiency"): of one layer Y = X W on P ranks, forward and
backward, with collectives as rings. `sent` and `hops` are bandwidth and latency of mpctl's messages
(model/operators/tensor_messages.py), with X, W and Y of equally many elements, which is the unit.

A rank's blocks are those of X [samples, hidden], the hidden states of a micro batch before an MLP,
W [hidden, ffn], its first matrix, and Y [samples, ffn], its result (tensor_grid.py has the cuts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.errors import InputError, Issue, IssueEntry
from mpctl.core.records import Json, to_json
from mpctl.core.tensor_grid import Axes, TensorGrid, grid_axes, grid_depths
from mpctl.core.topology import Topology
from mpctl.model.layout.topology import job_grid
from mpctl.plan.planning.plan import Overrides, Plan, load_plan
from mpctl.plan.planning.summary import TrainingEntry, training_settings
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_partial, require_job
from mpctl.spec.parallel import TensorMode

if TYPE_CHECKING:
    from mpctl.plan.estimate.job import Estimate
    from mpctl.spec.job import JobSpec


class GridSizes(NamedTuple):
    """The values of symbols: P ranks; q (in 3d written l) a side of the grid; d deep."""

    P: int
    q: int
    d: int


class Cost(NamedTuple):
    """A cost as a symbol, and the function that gives its value."""

    symbol: str
    value: Callable[[GridSizes], float]


# Columns by name, with what they mean.
COLUMNS = {
    "computation": "a rank's share of the FLOP",
    "parameters": "a rank's share of the weights, their gradients and optimizer states",
    "activations": "a rank's share of the activations",
    "bandwidth": "what a rank sends, as documented, in units of one matrix",
    "latency": "steps of the rings that follow each other, as documented",
    "sent": "what a rank of mpctl sends, in units of X, W or Y, each as large",
    "hops": "steps of mpctl's rings, one after the other",
}

_ROW = {
    "computation": Cost("1/P", lambda n: 1 / n.P),
    "parameters": Cost("1/P", lambda n: 1 / n.P),
    "activations": Cost("1", lambda n: 1.0),
    "bandwidth": Cost("2(P-1)/P", lambda n: 2 * (n.P - 1) / n.P),
    "latency": Cost("2(P-1)", lambda n: 2 * (n.P - 1)),
    "sent": Cost("2(P-1)/P", lambda n: 2 * (n.P - 1) / n.P),
    "hops": Cost("2(P-1)", lambda n: 2 * (n.P - 1)),
}
_SQUARE = {
    "computation": Cost("1/q^2", lambda n: 1 / n.q**2),
    "parameters": Cost("1/q^2", lambda n: 1 / n.q**2),
    "activations": Cost("1/q^2", lambda n: 1 / n.q**2),
    "bandwidth": Cost("6(q-1)/q", lambda n: 6 * (n.q - 1) / n.q),
    "latency": Cost("6(q-1)", lambda n: 6 * (n.q - 1)),
    "sent": Cost("6(q-1)/q^2", lambda n: 6 * (n.q - 1) / n.q**2),
    "hops": Cost("6q(q-1)", lambda n: 6 * n.q * (n.q - 1)),
}
_SQUARES = {
    "computation": Cost("1/dq^2", lambda n: 1 / (n.d * n.q**2)),
    "parameters": Cost("1/q^2", lambda n: 1 / n.q**2),
    "activations": Cost("1/dq^2", lambda n: 1 / (n.d * n.q**2)),
    "bandwidth": Cost("3(q-1)(d+1)/dq", lambda n: 3 * (n.q - 1) * (n.d + 1) / (n.d * n.q)),
    "latency": Cost("6(q-1)", lambda n: 6 * (n.q - 1)),
    "sent": Cost("3(q-1)(d+1)/dq^2", lambda n: 3 * (n.q - 1) * (n.d + 1) / (n.d * n.q**2)),
    "hops": Cost("6q(q-1)", lambda n: 6 * n.q * (n.q - 1)),
}
_CUBE = {
    "computation": Cost("1/l^3", lambda n: 1 / n.q**3),
    "parameters": Cost("1/l^3", lambda n: 1 / n.q**3),
    "activations": Cost("1/l^3", lambda n: 1 / n.q**3),
    "bandwidth": Cost("6(l-1)/l^3", lambda n: 6 * (n.q - 1) / n.q**3),
    "latency": Cost("6(l-1)", lambda n: 6 * (n.q - 1)),
    "sent": Cost("8(l-1)/l^3", lambda n: 8 * (n.q - 1) / n.q**3),
    "hops": Cost("8(l-1)", lambda n: 8 * (n.q - 1)),
}
COSTS: dict[str, dict[str, Cost]] = {"1d": _ROW, "2d": _SQUARE, "2.5d": _SQUARES, "3d": _CUBE}

NOTES = (
    "Symbols: P ranks; in 2d a square of q x q, in 2.5d d of them, in 3d a cube of l x l x l.",
    "1d keeps activations whole between the layers and cuts them inside attention and MLP; with "
    "sequence parallelism they are 1/P everywhere.",
    "2d and 2.5d, bandwidth: a rank's block is 1/q^2 of a matrix, and q of them pass by in each of "
    "the six broadcasts and reductions, so that rings send 1/q of what is documented. Each is q "
    "messages and not one, so that there are q times as many steps; all but the first are sent "
    "while the block before them is multiplied.",
    "3d, bandwidth: 8 and not 6, because X and W are gathered again for the backward instead of "
    "being kept, which the share of activations rests on.",
    "2.5d sums the gradients of weights over depth once a step, 2(d-1)/dq^2 more of W, which the columns leave out.",
    "The columns are of one linear layer. This job's numbers also have norms, which exchange "
    "statistics of rows where hidden states are cut, and, in those of a step, the lookup of words "
    "(a reduce-scatter), the head (Y = X W^T: it sends the table and reduces logits) and the loss.",
)


def grid_sizes(grid: TensorGrid) -> GridSizes:
    """The values of the symbols on a grid."""
    return GridSizes(grid.size, grid.hidden_parts, grid.axes.get("depth", 1))


class TensorModeEntry(TypedDict):
    """The job in one tensor mode.

    axes: of its grid, None where the ranks form no grid. costs: by column, a symbol and its value
    on the grid. issues: why it cannot run, empty where it can. layer: LayerFigures of this job.
    step: between the tensor-parallel ranks, sent_bytes of a rank of the stage that sends most and
    tensor_seconds of step_seconds; peak_bytes, and whether it fits.
    """

    tp: int
    mode: str
    depth: int | None
    axes: dict[str, int] | None
    costs: dict[str, Json]
    issues: list[IssueEntry]
    layer: Json | None
    step: Json | None


class TensorModesDocument(TypedDict):
    """Schema mpctl.tensor-modes/1: what `mpctl tensor-modes --json` prints.

    columns: what each column of costs means; changed: settings of the job that only 1d has and that
    the other modes leave out.
    """

    schema: Literal["mpctl.tensor-modes/1"]
    job: str | None
    training: TrainingEntry
    columns: dict[str, str]
    changed: list[str]
    modes: list[TensorModeEntry]
    notes: list[str]


Settings = dict[str, object]


def mode_choices(tp: int) -> list[tuple[TensorMode, int | None]]:
    """Tensor modes of `tp` ranks with their depths; a mode without a grid of so many ranks is
    listed once.

    >>> mode_choices(8), mode_choices(6)[2:]
    ([('1d', None), ('2d', None), ('2.5d', 2), ('3d', None)], [('2.5d', None), ('3d', None)])
    """
    depths = [d for d in grid_depths(tp) if d > 1]
    own: Mapping[str, Sequence[int | None]] = {"2.5d": depths or [None]}
    modes: tuple[TensorMode, ...] = get_args(TensorMode)
    return [(mode, depth) for mode in modes for depth in own.get(mode, [None])]


def same_as_2d(tp: int, mode: str, depth: int | None, where: str) -> Issue | None:
    """Return the issue of a mode that is not compared: 2.5d of depth 1 is exactly 2d. where: the place
    named in the issue."""
    axes = grid_axes(mode, tp, depth)
    if axes and axes.get("depth") == 1:
        message = f"{tp} ranks are one layer of 2.5d, which is 2d"
        return Issue("tensor-mode", where, message, "use d q^2 ranks with d at least 2")
    return None


def tensor_modes_document(source: str | None, overrides: Overrides, sizes: Sequence[int] = ()) -> TensorModesDocument:
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
    """The settings that give a job this tensor mode; replicas take the remaining ranks."""
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
        "tp": tp,
        "mode": mode,
        "depth": depth or (axes or {}).get("depth"),
        "axes": axes,
        "costs": dict(_costs(mode, axes)),
        "issues": [],
        "layer": None,
        "step": None,
    }
    try:
        plan = load_plan(source, {**overrides, **mode_settings(job, tp, mode, depth)})
    except InputError as error:
        entry["issues"] = [issue.as_dict() for issue in error.issues]
        return entry
    if issue := same_as_2d(tp, mode, depth, "parallel.tp"):
        entry["issues"] = [issue.as_dict()]
        return entry
    from mpctl.plan.planning.traffic import layer_figures

    assert plan.estimate is not None, "the job has a model"
    layer = entry["layer"] = to_json(layer_figures(plan.estimate.layout))
    layer.pop("traffic")  # by group and kind; here the sums
    entry["step"] = _step(plan, plan.estimate)
    return entry


def _costs(mode: str, axes: dict[str, int] | None) -> Iterator[tuple[str, Json]]:
    sizes = grid_sizes(TensorGrid(mode, axes)) if axes else None
    for name, cost in COSTS[mode].items():
        yield name, {"symbol": cost.symbol, "value": cost.value(sizes) if sizes else None}


def _step(plan: Plan, estimate: Estimate) -> Json:
    from mpctl.plan.planning.traffic import sent_bytes

    layout, time = estimate.layout, estimate.time
    kinds = {"tp", *layout.grid.groups}
    sent = (sent_bytes((m for m in stage if m.axis in kinds), layout.group_sizes) for stage in estimate.messages)
    return {
        "sent_bytes": max(sent),
        "tensor_seconds": None if isinstance(time, str) else time.tp,
        "step_seconds": estimate.step_seconds,
        "peak_bytes": estimate.fullest_stage.device_bytes,
        "fits": plan.fits,
    }


class HeldPart(NamedTuple):
    """A block of one dimension: `block` of its `size`, which is cut into `parts`."""

    dim: str
    size: int
    parts: int
    block: range

    @property
    def text(self) -> str:
        """`hidden 0-383 of 768`."""
        first, last = self.block[0], self.block[-1]
        span = str(first) if first == last else f"{first}-{last}"
        return f"{self.dim} {span} of {self.size}"


class HeldBlock(NamedTuple):
    """The block of a matrix that a rank holds, by rows and columns."""

    tensor: str
    rows: HeldPart
    columns: HeldPart


def held_blocks(grid: TensorGrid, sizes: Mapping[str, int], rank: int) -> tuple[HeldBlock, HeldBlock, HeldBlock]:
    """The blocks of X, W and Y of one rank of the grid, by its number in the tp group.

    sizes: unsharded `samples`, `hidden` and `ffn`. Raises ValueError where the grid does not divide
    them.
    """
    coords, (ffn, hidden) = grid.coords(rank), grid.weight_axes(("ffn", "hidden"))

    def part(dim: str, axes: Axes) -> HeldPart:
        return HeldPart(dim, sizes[dim], grid.parts(axes), grid.block(sizes[dim], axes, coords))

    inside = part("samples", grid.sample_axes(inside=True))
    return (
        HeldBlock("X", part("samples", grid.sample_axes()), part("hidden", grid.hidden_axes)),
        HeldBlock("W", part("hidden", hidden), part("ffn", ffn)),
        HeldBlock("Y", inside, part("ffn", grid.feature_axes)),
    )


def rank_blocks(plan: Plan, topology: Topology, rank: int) -> tuple[HeldBlock, ...]:
    """The blocks of one rank of the world; none in 1d or without an estimate."""
    model, grid = plan.job.model, job_grid(plan.job)
    if model is None or plan.layout is None or grid.mode == "1d":
        return ()
    samples = plan.job.training.micro_batch_size
    sizes = {"samples": samples, "hidden": model.hidden, "ffn": model.ffn}
    return held_blocks(grid, sizes, topology.group(rank, "tp").index(rank))
