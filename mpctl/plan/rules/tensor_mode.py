"""Rules about the modes of tensor parallelism: the grid of ranks, what it cuts, what runs with it.

In 2d, 2.5d and 3d the tp ranks are a grid (tensor_grid.py), whose axes cut samples, hidden states,
heads and columns of the MLP; each must divide what it cuts. By hand, tp 9 in 2d is a square of
3 x 3: 12 heads and 768 hidden are cut 3 ways, and a micro batch of 2 samples is refused for 3.

Sources: arXiv 2104.05343 (2d), 2105.14500 (2.5d), 2105.14450 (3d).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mpctl.core.axes import chosen_ranks
from mpctl.core.errors import Offer
from mpctl.core.tensor_grid import MODES, TensorGrid, grid_axes
from mpctl.core.units import plural
from mpctl.model.families import all_builtin, get_family
from mpctl.model.layout.draft import LayoutDraft
from mpctl.model.layout.topology import find_grid
from mpctl.plan.rules.check import Check, divides, listed, refusal
from mpctl.plan.rules.sizes import head_columns, settings_of_1d
from mpctl.spec.job import JobSpec
from mpctl.spec.schedules import SCHEDULES

SIDES = range(2, 65)  # q and l of the grids that are offered
MODE = "parallel.tensor_mode"
SHAPES = {"2d": "q x q", "2.5d": "d x q x q", "3d": "l x l x l"}
Parts = Callable[[TensorGrid], int]


def tensor_mode_rules(draft: LayoutDraft) -> Iterator[Check]:
    """The ranks are a square (2d), d squares (2.5d) or a cube (3d), with two or more a side."""
    job = draft.job
    p = job.parallel
    mode, depth = p.tensor_mode, p.tensor_depth
    if depth and mode != "2.5d":
        message = f"{depth} has no effect: it is d of 2.5d, and tensor_mode is {mode}"
        hint = "leave it out, or use tensor_mode 2.5d"
        yield Check("tensor-depth", "warning", "parallel.tensor_depth", message, hint)
    if mode == "1d":
        return
    grid = find_grid(job)
    if grid is not None:
        yield Check("tensor-mode", "ok", "parallel.tp", f"{plural(p.tp, 'rank')} = {_shape(grid)}")
        return
    shape = SHAPES[mode].replace("d", str(depth)) if depth and mode == "2.5d" else SHAPES[mode]
    side = "l" if mode == "3d" else "q"
    layers = ", d layers of a square," if shape.startswith("d") else ""
    message = f"tensor_mode {mode} needs {shape} ranks{layers} with {side} at least 2, not {p.tp}"
    offers = _other_sizes(job)
    if mode == "2.5d" and depth:
        depths = [d for d in range(1, SIDES.stop) if grid_axes(mode, p.tp, d)]
        grids = {d: TensorGrid.of(mode, p.tp, d) for d in depths}
        offers += _offers(job, "parallel.tensor_depth", "tensor_depth", grids, near=depth)
    yield refusal("tensor-mode", "parallel.tp", message, *offers, *_other_modes(job))


def _shape(grid: TensorGrid) -> str:
    """`2 x 2 x 3 (col x row x depth)`."""
    sizes = " x ".join(map(str, grid.axes.values()))
    return f"{sizes} ({' x '.join(grid.axes)})"


def grid_sizes(mode: str, depth: int | None) -> tuple[int, ...]:
    """Numbers of ranks that are a grid of a mode other than 1d, with sides up to 64.

    >>> grid_sizes("2d", None)[:3], grid_sizes("2.5d", 2)[:3], grid_sizes("3d", None)[:2]
    ((4, 9, 16), (8, 18, 32), (8, 27))
    """
    if mode == "3d":
        return tuple(side**3 for side in SIDES)
    if mode == "2d":
        return tuple(side**2 for side in SIDES)
    depths = {side: [depth] if depth else range(1, side + 1) for side in SIDES}
    return tuple(sorted({d * side**2 for side in SIDES for d in depths[side]}))


def _other_sizes(job: JobSpec, suits: Callable[[TensorGrid], bool] = bool) -> list[Offer]:
    """Numbers of ranks near tp that form a grid of the mode and suit: the nearest three, and the
    largest two in the world."""
    p, inner = job.parallel, chosen_ranks({**job.sizes, "tp": 1})
    sizes = grid_sizes(p.tensor_mode, p.tensor_depth)
    grids = {tp: TensorGrid.of(p.tensor_mode, tp, p.tensor_depth) for tp in sizes if tp != p.tp}
    legal = [tp for tp, grid in grids.items() if suits(grid)]
    nearest = sorted(legal, key=lambda tp: abs(tp - p.tp))[:3]
    held = [tp for tp in legal if job.world_size % (tp * inner) == 0][-2:]
    offered = {tp: grids[tp] for tp in sorted({*nearest, *held})}
    return _offers(job, "parallel.tp", "tp", offered, near=p.tp)


def _other_modes(job: JobSpec) -> list[Offer]:
    """The other modes in which these ranks form a grid."""
    p, own = job.parallel, find_grid(job)
    depth = None if p.tensor_mode == "2.5d" else p.tensor_depth
    others = {mode: grid_axes(mode, p.tp, depth) for mode in MODES if mode != p.tensor_mode}
    grids = {mode: TensorGrid(mode, axes) for mode, axes in others.items() if axes}
    new = {mode: grid for mode, grid in grids.items() if not own or _sides(grid) != _sides(own)}
    return _offers(job, MODE, "tensor_mode", new)


def _offers(
    job: JobSpec, setting: str, noun: str, grids: Mapping[Any, TensorGrid], near: int | None = None
) -> list[Offer]:
    """Values of a setting by the grids that they form; one offer for each micro batch size that
    they require, because the grid cuts the samples into other parts."""
    values: dict[int, list[int | str]] = {}
    micro = job.training.micro_batch_size
    for value, grid in grids.items():
        needed = -(-micro // grid.sample_parts) * grid.sample_parts
        values.setdefault(needed, []).append(value)
    offers = []
    for needed, found in values.items():
        also = (("training.micro_batch_size", needed),) if needed != micro else ()
        suffix = f" with micro batch {needed}" if also else ""
        offers.append(Offer(setting, tuple(found), noun, near, also=also, suffix=suffix))
    return offers


def _sides(grid: TensorGrid) -> dict[str, int]:
    """The axes of more than one rank: 2.5d of depth 1 is 2d."""
    return {axis: size for axis, size in grid.axes.items() if size > 1}


def grid_divides(job: JobSpec, rule: str, size: int, noun: str, parts: Parts) -> Iterator[Check]:
    """The check that the ranks can cut `size` things, in 1d into tp parts and in other modes into
    `parts` of their grid; none where the ranks form no grid, which tensor_mode_rules reports."""
    p, grid, where = job.parallel, find_grid(job), "parallel.tp"
    if grid is None:
        return
    if grid.mode == "1d":
        yield divides(rule, where, size, p.tp, noun)
    elif size % parts(grid) == 0:
        yield Check(rule, "ok", where, f"{parts(grid)} divides {size} {noun}")
    else:
        by = parts(grid)
        message = f"tp {p.tp} in {grid.mode} cuts {noun} into {by}, and {by} does not divide {size}"
        sizes = _other_sizes(job, lambda other: size % parts(other) == 0)
        yield refusal(rule, where, message, *sizes, *_other_modes(job))


def feature_parts(grid: TensorGrid) -> int:
    """The number of parts into which the heads are divided, none of them split."""
    return grid.feature_parts


def hidden_columns(grid: TensorGrid) -> int:
    """The most parts into which a layer's matrices cut the hidden size: in 3d l^2."""
    return max(map(grid.parts, (grid.weight_axes(("ffn", "hidden"))[1], grid.hidden_axes)))


def feature_columns(grid: TensorGrid) -> int:
    """The most parts into which a layer's matrices cut the columns of heads and MLP: in 3d l^2, as
    the rows of the next matrix."""
    return max(map(grid.parts, (grid.weight_axes(("hidden", "ffn"))[1], grid.feature_axes)))


def grid_width_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Sizes that a grid cuts and 1d does not: hidden, and in 3d the columns of all heads by l^2."""
    job = draft.job
    model, p = job.model, job.parallel
    if model is None or p.tensor_mode == "1d":
        return
    noun = "hidden features"
    yield from grid_divides(job, "tp-divides-hidden", model.hidden, noun, hidden_columns)
    grid = find_grid(job)
    columns = model.heads * (head_columns(model) or 0)
    if grid is not None and columns and feature_columns(grid) > grid.feature_parts:
        noun = "columns of attention heads"
        yield from grid_divides(job, "tp-divides-head-columns", columns, noun, feature_columns)


def sample_rules(draft: LayoutDraft) -> Iterator[Check]:
    """A grid cuts the samples of a micro batch: over rows (2d), rows and depth (2.5d), or l^2
    ranks (3d)."""
    job = draft.job
    grid, where, micro = find_grid(job), "training.micro_batch_size", job.training.micro_batch_size
    if grid is None or grid.sample_parts == 1:
        return
    rule, parts = "tensor-mode-samples", grid.sample_parts
    if micro % parts == 0:
        message = f"micro batch {micro} = {plural(micro // parts, 'sample')} on each of {parts}"
        yield Check(rule, "ok", where, f"{message} parts of the grid")
        return
    message = f"tensor_mode {grid.mode} cuts the samples of a micro batch into {parts}, and "
    message += f"{parts} does not divide {micro}"
    values = tuple(parts * k for k in range(1, 65))
    batch = parts * job.sizes["dp"]
    more = f"micro batch {parts} with a global batch that is a multiple of {batch}"
    is_whole = (job.training.global_batch_size or batch) % batch == 0
    yield refusal(
        rule,
        where,
        message,
        Offer(where, values, "micro batch", near=micro),
        *_other_modes(job),
        more="" if is_whole else more,
    )


def combination_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Settings that run only in 1d."""
    job = draft.job
    p, training = job.parallel, job.training
    mode = p.tensor_mode
    if mode == "1d":
        return
    in_1d = Offer(MODE, ("1d",), "tensor_mode")
    only_1d = settings_of_1d(sequence_parallel=p.sequence_parallel, cp=p.cp, schedule=p.schedule)
    if "sequence_parallel" in only_1d:
        message = f"true is for tensor_mode 1d: {mode} cuts samples and hidden states between "
        message += "layers, and not the sequence"
        more = "--no-sequence-parallel"
        yield refusal("tensor-mode-sequence", "parallel.sequence_parallel", message, in_1d, more=more)
    if "cp" in only_1d:
        message = f"a sequence shared by {p.cp} ranks is not run with tensor_mode {mode}"
        offer = Offer("parallel.cp", (1,), "cp")
        yield refusal("tensor-mode-context", "parallel.cp", message, offer, in_1d)
    if "schedule" in only_1d:
        yield _schedule(job, in_1d)
    if training.partition_activations:
        message = f"true is for tensor_mode 1d: {mode} cuts the inputs of layers already"
        more = "training.partition_activations false"
        yield refusal("tensor-mode-partition", "training.partition_activations", message, in_1d, more=more)
    if training.freeze:
        message = f"frozen parameters are not run with tensor_mode {mode}"
        yield refusal("tensor-mode-freeze", "training.freeze", message, in_1d, more="no training.freeze")


def _schedule(job: JobSpec, in_1d: Offer) -> Check:
    """A schedule that computes gradients of weights later than those of inputs."""
    p = job.parallel
    message = f"{p.schedule} computes the gradients of weights by themselves, which tensor_mode "
    message += f"{p.tensor_mode} does not"
    whole = (name for name, row in SCHEDULES.items() if not row.splits_backward)
    names = tuple(name for name in whole if SCHEDULES[name].runs(p.vpp))
    offer = Offer("parallel.schedule", names)
    return refusal("tensor-mode-schedule", "parallel.schedule", message, offer, in_1d)


def family_mode_rules(draft: LayoutDraft) -> Iterator[Check]:
    """The model's family runs in the mode, as its description says."""
    job = draft.job
    mode, model = job.parallel.tensor_mode, job.model
    if model is None or mode in (modes := get_family(model.family).tensor_modes):
        return
    others = [family.name for family in all_builtin() if mode in family.tensor_modes]
    message = f"family {model.family} does not run in {mode}"
    offer = Offer(MODE, modes, "tensor_mode")
    more = f"a model of family {listed(others)}"
    yield refusal("tensor-mode-family", MODE, message, offer, more=more)
