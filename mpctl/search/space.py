"""Which layouts there are for a job on its cluster: generators of the values that divide.

A layout is what may differ between two ways to run one job: axis sizes, their order, how the
pipeline is cut and run, micro batch, recomputation, sequence parallelism, ZeRO, tensor mode
(tensor_grids.py). Everything else of the job stays. By default only what the job's runtime runs is
searched ([runs] of its preset): of ours what `mpctl launch` accepts, of others what their papers
and sources say. Two settings are left out unless they are fixed: GPipe, which takes as long as 1F1B
and needs more memory, and selective recomputation where it saves none, as beside fused attention.

The space is a tree (keys.py), so that a bound can rule out many layouts at once (bound.py):

    AxesKey        axis sizes, and the settings that a layer's seconds follow from (LayerKey)
    LayoutFamily   an AxesKey with a pipeline: chunks, schedule, how layers are cut
    LayoutSettings a member of a family: one value for each row of MEMBER_SETTINGS

To search one more setting: give LayoutSettings a field of its name (planning/layout_settings.py)
and MEMBER_SETTINGS a row with the function of its legal values. Bounds hold as long as no value
makes a step faster than the family's bound, which counts kernels, host and pipeline, or needs less
memory than LayoutEvaluator.min_bytes; a setting that does belongs into LayerKey or LayoutFamily.

By hand, 24 layers, 16 heads, 4 GPUs in a node, a batch of 8: tp 1, 2 or 4; tp 2 leaves pp 1 or 2;
tp 2, pp 1, dp 2 leaves micro batches of 1, 2 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import permutations
from typing import Any, NamedTuple

from mpctl.axes import find_order
from mpctl.estimate.activation_shapes import activation_shapes
from mpctl.estimate.saved_activations import layer_activations
from mpctl.layout.job_layout import JobLayout
from mpctl.layout.link_levels import LinkLevel, link_levels
from mpctl.pipeline.filled import job_cut
from mpctl.pipeline.schedule.legality import is_schedule
from mpctl.planning.layout_settings import TRAINING, LayoutSettings, SettingValue
from mpctl.rules.validate import has_errors
from mpctl.sharding import divisors
from mpctl.spec.job import JobSpec, ends_count_as_layers
from mpctl.spec.model import ModelSpec
from mpctl.spec.parallel import ScheduleName, TensorMode
from mpctl.spec.runtime import RuntimeSupport, get_profile
from mpctl.spec.schedules import SCHEDULES
from mpctl.tensor_grid import TensorGrid, grid_axes, grid_depths


@dataclass(frozen=True)
class SearchedGrids:
    """The grids to try for a complete job with a model. modes: those that its runtime runs; fixed:
    fields of a layout with the value that they keep."""

    job: JobSpec
    modes: list[TensorMode]
    fixed: Mapping[str, Any]

    def of(self, tp: int) -> list[TensorGrid]:
        """The grids of so many ranks, the row first."""
        if tp not in self._grids:
            self._grids[tp] = list(self._find(tp))
        return self._grids[tp]

    @cached_property
    def _grids(self) -> dict[int, list[TensorGrid]]:
        return {}

    @cached_property
    def _sharded(self) -> dict[tuple[object, ...], bool]:
        return {}

    def _find(self, tp: int) -> Iterator[TensorGrid]:
        model, fixed = self.job.model, self.fixed.get("tensor_mode")
        assert model is not None, "a search is of a model"
        if fixed in (None, "1d") and _divides(model, tp):
            yield TensorGrid("1d", {"tp": tp})
        for mode in self.modes if fixed is None else [fixed]:
            for depth in self._depths(mode, tp) if mode != "1d" else ():
                axes = grid_axes(mode, tp, depth)
                if axes is not None and self._accepts(TensorGrid(mode, axes), zero=0):
                    yield TensorGrid(mode, axes)

    def _depths(self, mode: str, tp: int) -> list[int | None]:
        """The depths of 2.5d; without a fixed mode those from 2 on."""
        if mode != "2.5d":
            return [None]
        if self.fixed.get("tensor_depth"):
            return [self.fixed["tensor_depth"]]
        least = 1 if "tensor_mode" in self.fixed else 2
        return [depth for depth in grid_depths(tp) if depth >= least]

    def shards(self, grid: TensorGrid, zero: int) -> bool:
        """Whether this ZeRO stage can be had with the grid of another mode than 1d."""
        key = grid.mode, *grid.axes.values(), zero
        if key not in self._sharded:
            self._sharded[key] = self._accepts(grid, zero=zero)
        return self._sharded[key]

    def _accepts(self, grid: TensorGrid, *, zero: int) -> bool:
        """Whether the rules accept the grid in the plainest layout of the job: all other ranks are
        replicas, and a micro batch has one sample for each part."""
        dp = self.job.world_size // grid.size
        parallel = {
            "tp": grid.size, "cp": 1, "dp": dp, "pp": 1, "vpp": 1, "schedule": "1f1b",
            "zero": zero, "sequence_parallel": False, "stage_balance": "even",
            "first_stage_layers": None, "last_stage_layers": None, "allow_tp_across_nodes": True,
            "tensor_mode": grid.mode, "tensor_depth": grid.axes.get("depth"),
        }  # fmt: skip
        training = {
            "micro_batch_size": grid.sample_parts, "global_batch_size": grid.sample_parts * dp,
            "recompute": "none", "partition_activations": False, "offload_activations": False,
        }  # fmt: skip
        job = self.job
        tables = {
            "parallel": job.parallel.model_copy(update=parallel),
            "training": job.training.model_copy(update=training),
        }
        return not has_errors(job.model_copy(update=tables))


def _divides(model: ModelSpec, tp: int) -> bool:
    """Whether tp ranks in a row divide heads and ffn."""
    kv_fits = model.kv_heads % tp == 0 or tp % model.kv_heads == 0
    return model.heads % tp == 0 and model.ffn % tp == 0 and kv_fits


def combines(mode: str, schedule: ScheduleName) -> bool:
    """Whether a pipeline's schedule can be had with a tensor mode: those that defer the gradients
    of weights are of 1d alone."""
    return mode == "1d" or not SCHEDULES[schedule].splits_backward


AXES = ("tp", "cp", "dp", "pp")
DEFAULT_ORDER = "-".join(AXES)


class LayerKey(NamedTuple):
    """What the seconds of a layer follow from, whatever the pipeline."""

    tp: int
    cp: int
    micro_batch_size: int
    sequence_parallel: bool
    recompute: str
    tensor_mode: str = "1d"
    tensor_depth: int | None = None

    @property
    def grid(self) -> TensorGrid:
        """The tensor-parallel ranks as a grid."""
        splits = self.sequence_parallel
        return TensorGrid.of(self.tensor_mode, self.tp, self.tensor_depth, sequence_parallel=splits)


class AxesKey(NamedTuple):
    """A layer key with the sizes of the other axes; microbatches: of a replica in one step."""

    layer: LayerKey
    dp: int
    pp: int
    microbatches: int


class LayoutFamily(NamedTuple):
    """Layouts that differ in MEMBER_SETTINGS only: axes and pipeline are the same."""

    axes: AxesKey
    vpp: int
    schedule: ScheduleName
    stage_balance: str

    @property
    def plain(self) -> LayoutSettings:
        """The family's layout without ZeRO; its order is left empty."""
        layer, dp, pp, _ = self.axes
        return LayoutSettings(
            layer.tp, layer.cp, dp, pp, self.vpp, self.schedule, self.stage_balance,
            layer.micro_batch_size, layer.recompute, layer.sequence_parallel, 0, "",
            layer.tensor_mode, layer.tensor_depth,
        )  # fmt: skip

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes of tp, cp, dp and pp."""
        return self.axes.layer.tp, self.axes.layer.cp, self.axes.dp, self.axes.pp

    @property
    def replicas(self) -> int:
        """Ranks over which gradients are reduced and ZeRO shards."""
        return self.axes.dp * self.axes.layer.cp


class MemberSetting(NamedTuple):
    """A setting in which the layouts of a family differ.

    name: a field of LayoutSettings; values: its legal values for a family, in a fixed order.
    """

    name: str
    values: Callable[[SearchSpace, LayoutFamily], Sequence[SettingValue]]


@dataclass(frozen=True)
class SearchSpace:
    """The layouts to search for a job.

    job: complete, with a model. fixed: fields of a layout with the value that they keep. largest:
    fields with the largest value that is tried. settings: those in which a family's layouts differ,
    MEMBER_SETTINGS when empty.
    """

    job: JobSpec
    fixed: Mapping[str, Any] = field(default_factory=dict)
    largest: Mapping[str, int] = field(default_factory=dict)
    settings: tuple[MemberSetting, ...] = ()

    @cached_property
    def world(self) -> int:
        """Ranks of the job."""
        return self.job.world_size

    @cached_property
    def domain(self) -> LinkLevel:
        """The NVLink domains, by default nodes, that the job's ranks lie in."""
        cluster = self.job.cluster
        return link_levels(cluster, cluster.nodes, cluster.gpus_per_node or 1)[0]

    @cached_property
    def model(self) -> ModelSpec:
        """The job's model."""
        assert self.job.model is not None, "a search is of a model"
        return self.job.model

    @cached_property
    def layers(self) -> int:
        """Layers that the pipeline cuts, an encoder's and a decoder's together."""
        return self.model.all_layers

    @cached_property
    def runs(self) -> RuntimeSupport:
        """What the job's runtime runs."""
        return get_profile(self.job.training.runtime).runs

    @cached_property
    def grids(self) -> SearchedGrids:
        """The grids of tensor-parallel ranks to try."""
        return SearchedGrids(self.job, self.runs.tensor_modes, self.fixed)

    @property
    def member_settings(self) -> tuple[MemberSetting, ...]:
        """The settings in which a family's layouts differ."""
        return self.settings or MEMBER_SETTINGS

    @cached_property
    def _pipelines(self) -> dict[tuple[int, int], list[tuple[int, ScheduleName, str]]]:
        return {}

    @cached_property
    def _sequence_lengths(self) -> list[int]:
        return [n for n in (self.model.seq_length, self.model.decoder_seq_length) if n]

    def layouts(self) -> Iterator[LayoutSettings]:
        """All layouts, in a fixed order."""
        for axes in self.axes():
            for family in self.families(axes):
                yield from self.members(family)

    def axes(self) -> Iterator[AxesKey]:
        """Every way to fill the world, with the settings that a layer's seconds follow from."""
        for tp in self.tensor_sizes():
            for grid in self.grids.of(tp):
                for cp in self.context_sizes(tp):
                    for pp in self.pipeline_sizes(tp * cp) if grid.mode == "1d" or cp == 1 else ():
                        dp = self.world // (tp * cp * pp)
                        if self._admits("dp", dp):
                            yield from self._layer_settings(grid, cp, dp, pp)

    def _layer_settings(self, grid: TensorGrid, cp: int, dp: int, pp: int) -> Iterator[AxesKey]:
        own = grid.mode, grid.axes.get("depth")
        for size in self.micro_batch_sizes(dp):
            microbatches = (self.job.training.global_batch_size or dp) // (size * dp)
            for splits in self.sequence_parallel(grid, cp) if size % grid.sample_parts == 0 else ():
                for recompute in self._recompute_modes:
                    layer = LayerKey(grid.size, cp, size, splits, recompute, *own)
                    yield AxesKey(layer, dp, pp, microbatches)

    @cached_property
    def _recompute_modes(self) -> list[str]:
        """The modes of recomputation to try: without selective where it forms nothing again that
        was not saved, as of fused attention, so that it only costs time."""
        modes = self._fixed_or("recompute", self.runs.recompute)
        if len(modes) < 2 or "selective" not in modes:
            return [*modes]
        layout = JobLayout.of(self.job_of(self.replicated._replace(recompute="selective")))
        shapes = activation_shapes(layout)
        spares = any(
            layer_activations(shapes, stack.cores_of(layer)).recomputed
            for stack in layout.table.stacks
            for layer in range(stack.layers)
        )
        return [mode for mode in modes if spares or mode != "selective"]

    @property
    def replicated(self) -> LayoutSettings:
        """The layout that every job has: a replica of the whole model on each rank."""
        return LayoutSettings(
            1, 1, self.world, 1, 1, "1f1b", "even", 1, "full", False, 0, DEFAULT_ORDER
        )

    def families(self, axes: AxesKey) -> Iterator[LayoutFamily]:
        """Every pipeline over these axes."""
        key = axes.pp, axes.microbatches
        if key not in self._pipelines:
            self._pipelines[key] = list(self.pipelines(*key))
        for vpp, schedule, balance in self._pipelines[key]:
            if combines(axes.layer.tensor_mode, schedule):
                yield LayoutFamily(axes, vpp, schedule, balance)

    def members(self, family: LayoutFamily) -> Iterator[LayoutSettings]:
        """The layouts of a family: one for each choice of values of the member settings."""
        layouts = iter((family.plain,))
        for setting in self.member_settings:
            layouts = _with_each(layouts, setting.name, setting.values(self, family))
        return layouts

    def tensor_sizes(self) -> Iterator[int]:
        """Sizes of tp of which a grid divides the model, and which keep groups in their NVLink
        domains unless the job allows otherwise."""
        may_leave = self.job.parallel.allow_tp_across_nodes or "tp" in self.fixed
        for tp in divisors(self.world):
            stays = self.domain.ranks % tp == 0 or may_leave
            runs = tp == 1 or self._runs("tp", self.runs.tensor)
            if stays and runs and self._admits("tp", tp) and self.grids.of(tp):
                yield tp

    def context_sizes(self, tp: int) -> Iterator[int]:
        """Sizes of cp that leave each rank two equal blocks of the sequence."""
        for cp in divisors(self.world // tp):
            divides = cp == 1 or all(length % (2 * cp) == 0 for length in self._sequence_lengths)
            runs = cp == 1 or self._runs("cp", self.runs.context)
            if divides and runs and self._admits("cp", cp):
                yield cp

    def pipeline_sizes(self, inner: int) -> Iterator[int]:
        """Numbers of stages, of which none is without a layer; inner: tp x cp."""
        for pp in divisors(self.world // inner):
            runs = pp == 1 or self._runs("pp", self.runs.pipeline)
            if pp <= self.layers and runs and self._admits("pp", pp):
                yield pp

    def micro_batch_sizes(self, dp: int) -> Iterator[int]:
        """Sizes that divide a replica's share of the global batch."""
        batch = self.job.training.global_batch_size or dp
        if batch % dp == 0:
            sizes = divisors(batch // dp)
            yield from (size for size in sizes if self._admits("micro_batch_size", size))

    def sequence_parallel(self, grid: TensorGrid, cp: int) -> Sequence[bool]:
        """Off, and on where a row of ranks divides a rank's part of the sequence."""
        tp, is_row = grid.size, grid.mode == "1d"
        divides = tp > 1 and all(length % (tp * cp) == 0 for length in self._sequence_lengths)
        splits = divides and is_row and self.runs.sequence
        values = self._fixed_or("sequence_parallel", (False, True) if splits else (False,))
        return values if is_row else [value for value in values if not value]

    def pipelines(self, pp: int, microbatches: int) -> Iterator[tuple[int, ScheduleName, str]]:
        """(chunks a stage, schedule, stage balance) of so many stages. Several chunks are small,
        and cut evenly; by cost only where their number is fixed."""
        too_few = self.runs.needs_full_pipeline and microbatches < pp - 1
        if too_few and "pp" not in self.fixed:
            return
        for vpp in divisors(self.layers):
            runs = vpp == 1 or self._runs("vpp", self.runs.chunks)
            if pp * vpp > self.layers or not runs or not self._admits("vpp", vpp):
                continue
            for schedule in self._schedules(pp, vpp):
                if is_schedule(schedule, stages=pp, microbatches=microbatches, chunks=vpp):
                    for balance in self._balances(pp, vpp):
                        yield vpp, schedule, balance

    def _schedules(self, pp: int, vpp: int) -> Sequence[ScheduleName]:
        """The schedules to try. With chunks, 1f1b is the interleaved one, and goes by the name that
        the job gives it."""
        if "schedule" in self.fixed:
            return (self.fixed["schedule"],)
        if vpp > 1:
            return ("interleaved" if self.job.parallel.schedule == "interleaved" else "1f1b",)
        return ("1f1b",) if pp == 1 else self.runs.schedules

    def _balances(self, pp: int, vpp: int) -> Iterator[str]:
        even = self.layers % (pp * vpp) == 0 or self.counts_ends(pp * vpp)
        if self.runs.fills_stages and pp > 1 and vpp == 1:
            even = self.fills(pp)
        by_cost = self.runs.by_cost and pp > 1 and (vpp == 1 or "vpp" in self.fixed)
        legal = ["even"] * even + ["cost"] * by_cost
        if even or self.fixed.get("stage_balance") != "even":
            yield from self._fixed_or("stage_balance", legal)

    def counts_ends(self, blocks: int) -> bool:
        """Whether embedding and loss are counted as layers; with so few layers in a block that the
        first one would hold one at most, the layout is not searched."""
        is_deep = self.layers + 2 > 2 * blocks
        return is_deep and ends_count_as_layers(self.layers, blocks, self.job.training.runtime)

    def fills(self, pp: int) -> bool:
        """Whether a runtime that fills stages one after the other gives each of them something."""
        return self.job.model is not None and job_cut(self.job.model, pp).loss_stage == pp - 1

    def zero_stages(self, family: LayoutFamily) -> list[int]:
        """ZeRO stages; with a single replica all are the same, and one is tried."""
        stages = self.runs.zero if family.replicas > 1 else self.runs.zero[:1]
        if family.axes.layer.tensor_mode != "1d":
            grid = family.axes.layer.grid
            stages = [stage for stage in stages if self.grids.shards(grid, stage)]
        return list(self._fixed_or("zero", stages))

    def orders(self, family: LayoutFamily) -> Sequence[str]:
        """Orders of the axes over ranks that the runtime has: tp first, of the others those that
        place ranks otherwise in NVLink domains; the default's name for all that are as it."""
        if "order" in self.fixed:
            return [self.fixed["order"]]
        if self.domain.ranks >= self.world:
            return [DEFAULT_ORDER]
        return _orders(tuple(family.sizes), tuple(self.runs.orders or ()))

    def _fixed_or(self, name: str, legal: Sequence[Any]) -> Sequence[Any]:
        """The value that is fixed, which the rules judge, else the legal ones."""
        return [self.fixed[name]] if name in self.fixed else legal

    def _admits(self, name: str, value: Any) -> bool:
        """Whether the value is the fixed one, where there is one, and not too large."""
        if name in self.fixed and self.fixed[name] != value:
            return False
        return name not in self.largest or value <= self.largest[name]

    def _runs(self, name: str, runs: bool) -> bool:
        return runs or name in self.fixed

    def job_of(self, layout: LayoutSettings) -> JobSpec:
        """The job under a layout."""
        values = layout._asdict()
        training = {key: values.pop(key) for key in TRAINING}
        ends = self.counts_ends(layout.pp * layout.vpp) and layout.stage_balance == "even"
        values |= dict.fromkeys(("first_stage_layers", "last_stage_layers"))
        values |= dict.fromkeys(("embedding_is_layer", "loss_is_layer"), ends)
        is_full = layout.recompute == "full"
        given = self.job.training
        training["offload_activations"] = is_full and given.offload_activations
        training["partition_activations"] = (
            is_full and given.partition_activations and not layout.sequence_parallel
        )
        return self.job.model_copy(
            update={
                "parallel": self.job.parallel.model_copy(update=values),
                "training": given.model_copy(update=training),
            }
        )


MEMBER_SETTINGS = (
    MemberSetting("zero", SearchSpace.zero_stages),
    MemberSetting("order", SearchSpace.orders),
)


@lru_cache(maxsize=4096)
def _orders(axis_sizes: tuple[int, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """The orders of axes of these sizes that place ranks differently, by the names that a runtime
    has for them; all of them where it does not say which it has."""
    sizes = dict(zip(AXES, axis_sizes, strict=True))
    outer = [axis for axis in AXES[1:] if sizes[axis] > 1]
    if len(outer) < 2:
        return (DEFAULT_ORDER,)
    idle = [axis for axis in AXES[1:] if axis not in outer]
    turns = ["-".join(("tp", *idle, *turn)) for turn in permutations(outer)]
    names = known or (DEFAULT_ORDER, *turns)
    return tuple(name for turn in turns if (name := find_order(turn, names, sizes)))


def _with_each(
    layouts: Iterator[LayoutSettings], name: str, values: Sequence[SettingValue]
) -> Iterator[LayoutSettings]:
    """Each layout with each value of a setting."""
    changes: list[dict[str, Any]] = [{name: value} for value in values]
    return (layout._replace(**change) for layout in layouts for change in changes)
