"""Generate the layouts of a job from the values that its rules accept.

A layout is everything that may differ between two ways to run one job: axis sizes, their order, how
the pipeline is cut and run, micro batch, recomputation, sequence parallelism, ZeRO, tensor mode.
Everything else of the job stays. By default only layouts that the job's runtime runs are searched
([runs] of its preset): for ours those that `mpctl launch` accepts, for others those that their
papers and sources describe, less what their launcher's config cannot say ([searched]). Two settings
are left out unless they are fixed: GPipe, which takes as long as 1F1B and needs more memory, and
selective recomputation where it saves none, as with fused attention.

The space is a tree, so that a bound can rule out many layouts at once (bound.py). A node of it is
the plainest of its layouts:

    axes      axis sizes, those of experts too, and the settings that determine a layer's seconds;
              one stage after the other, one chunk each
    family    the same with a pipeline: chunks, schedule, how layers are cut
    layout    a member of a family: one value for each row of MEMBER_SETTINGS

To search one more setting: give LayoutSettings a field of its name (plan/planning/layout_settings.py)
and MEMBER_SETTINGS a row with the function of its legal values. Bounds hold as long as no value
makes a step faster than the family's bound, which counts kernels, host and pipeline, or needs less
memory than LayoutEvaluator.min_bytes; a setting that does belongs to axes or family.

Of a model with experts every ep is tried that divides them and, with pp, the world; etp tp where
there are too few experts for an ep as large as both: as many ranks with etp 1 hold and compute as
much, within 2 %, and get each row once. Where tp is above 1 the sequence is split over it, so that
no token is routed twice, and an order is tried if both views of the ranks have its pipelines. A cp
and a micro batch with a common divisor are left out: more replicas divide samples at less cost.

A size of tp is tried as a row of ranks (1d) where that divides the model; as a square (2d), layers
of squares (2.5d) or a cube (3d) where the job's runtime runs that tensor mode and the rules accept
it for this model. 2.5d of depth 1 is 2d, and tried only where 2.5d is fixed.

By hand, 24 layers, 16 heads, 4 GPUs in a node, a batch of 8: tp 1, 2 or 4; tp 2 leaves pp 1 or 2;
tp 2, pp 1, dp 2 leaves micro batches of 1, 2 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import permutations, product
from math import gcd
from typing import Any, NamedTuple

from mpctl.core.axes import (
    AXES,
    AXIS_NAMES,
    DEFAULT_ORDER,
    EXPERT_AXES,
    FILLING,
    Axis,
    chosen_ranks,
    find_order,
    used_axes,
)
from mpctl.core.sharding import divisors
from mpctl.core.tensor_grid import TensorGrid, grid_axes, grid_depths
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.layout.link_levels import LinkLevel, link_levels
from mpctl.model.pipeline.filled import job_cut
from mpctl.model.pipeline.schedule.legality import is_schedule
from mpctl.plan.estimate.activation_shapes import activation_shapes
from mpctl.plan.estimate.saved import layer_activations
from mpctl.plan.planning.layout_settings import TRAINING, LayoutSettings, SettingValue
from mpctl.plan.rules.sizes import (
    are_neighbours,
    deals_heads,
    is_legal_size,
    sequence_parts,
    settings_of_1d,
    splits_heads,
    splits_sequences,
    stays_in_domain,
    views_agree,
)
from mpctl.plan.rules.validate import find_errors
from mpctl.spec.job import JobSpec, ends_count_as_layers
from mpctl.spec.model import ModelSpec
from mpctl.spec.parallel import CpComm, ScheduleName
from mpctl.spec.runtime import RuntimeSupport, get_profile, job_profile
from mpctl.spec.schedules import SCHEDULES
from mpctl.spec.training import TrainingSpec

CHOSEN = tuple(axis for axis in AXES if axis.name != FILLING)


class MemberSetting(NamedTuple):
    """A setting in which the layouts of a family differ.

    name: a field of LayoutSettings; values: its legal values for a family, in a fixed order, by the
    family's axis sizes and tensor mode.
    """

    name: str
    values: Callable[[SearchSpace, LayoutSettings], Sequence[SettingValue]]


@dataclass(frozen=True)
class SearchSpace:
    """The layouts to search for a job.

    job: complete, with a model. fixed: fields of a layout with their fixed values. largest: fields
    with the largest value that is tried. settings: those in which a family's layouts differ,
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
        """The NVLink domains, by default nodes, that contain the job's ranks."""
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
        """The settings of the job's runtime to try."""
        profile = get_profile(self.job.training.runtime)
        return profile.searched or profile.runs

    @property
    def member_settings(self) -> tuple[MemberSetting, ...]:
        """The settings in which a family's layouts differ."""
        return self.settings or MEMBER_SETTINGS

    @cached_property
    def _known(self) -> dict[tuple[object, ...], Any]:
        return {}

    def _once(self, key: tuple[object, ...], find: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]

    def layouts(self) -> Iterator[LayoutSettings]:
        """All layouts, in a fixed order."""
        for axes in self.axes():
            for family in self.families(axes):
                yield from self.members(family)

    def axes(self) -> Iterator[LayoutSettings]:
        """Every way to fill the world, with the settings that determine a layer's seconds; the
        order is left empty, and there is no ZeRO."""
        for sizes in self._sizes({}, CHOSEN):
            for grid in self.grids(sizes["tp"]):
                for experts in self._expert_sizes(sizes):
                    layout = LayoutSettings(order="").with_sizes({**sizes, **experts})
                    yield from self._layer_settings(layout, grid)

    def _expert_sizes(self, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """The etp and ep to try, whose ranks fill with edp what pp leaves of the world; 1 of a
        model without experts, unless they are fixed, which the rules then refuse."""
        if self.model.experts is None:
            yield {"etp": self.fixed.get("etp", 1), "ep": self.fixed.get("ep", 1)}
            return
        stage = self.world // sizes["pp"]
        for etp in self._fixed_or("etp", sorted({1, sizes["tp"]})):
            if stage % etp == 0 and self._tries_experts("etp", etp):
                for ep in divisors(stage // etp):
                    is_beaten = etp > 1 and "etp" not in self.fixed and "ep" not in self.fixed
                    is_beaten = is_beaten and is_legal_size(self.job, "ep", etp * ep)
                    if self._tries_experts("ep", ep) and not is_beaten:
                        yield {"etp": etp, "ep": ep}

    def _tries_experts(self, name: str, size: int) -> bool:
        axis = self._axes_of_experts[name]
        return (
            self.admits(name, size)
            and (size == 1 or self._runs(name, self.runs.has_axis(axis)))
            and is_legal_size(self.job, name, size)
        )

    @cached_property
    def _axes_of_experts(self) -> dict[str, Axis]:
        return {axis.name: axis for axis in EXPERT_AXES}

    def _sizes(self, sizes: dict[str, int], axes: Sequence[Axis]) -> Iterator[dict[str, int]]:
        """The sizes so far with every legal size of the other axes; the last one takes the rest."""
        rest = self.world // chosen_ranks({**dict.fromkeys(AXIS_NAMES, 1), **sizes})
        if not axes:
            if self.admits(FILLING, rest):
                yield {**sizes, FILLING: rest}
            return
        axis, *others = axes
        for size in divisors(rest):
            if self._tries(axis, size):
                yield from self._sizes({**sizes, axis.name: size}, others)

    def _tries(self, axis: Axis, size: int) -> bool:
        """Whether to try a size of an axis: the runtime has the axis and the rules accept the size,
        unless it is fixed; tp stays within NVLink domains unless the job allows otherwise."""
        name, may_leave = axis.name, self.job.parallel.allow_tp_across_nodes or "tp" in self.fixed
        return (
            self.admits(name, size)
            and (size == 1 or self._runs(name, self.runs.has_axis(axis)))
            and (name != "tp" or may_leave or stays_in_domain(size, self.domain.ranks))
            and is_legal_size(self.job, name, size)
        )

    def _layer_settings(self, sizes: LayoutSettings, grid: TensorGrid) -> Iterator[LayoutSettings]:
        overlap = self.fixed.get("moe_overlap", False)
        sizes = sizes._replace(tensor_mode=grid.mode, tensor_depth=grid.axes.get("depth"), moe_overlap=overlap)
        for micro in self.micro_batch_sizes(sizes.dp):
            if self._cuts_in_vain(sizes.cp, micro):
                continue
            for splits in self.sequence_parallel(grid, sizes.cp):
                layout = sizes._replace(micro_batch_size=micro, sequence_parallel=splits)
                if micro % grid.sample_parts == 0 and runs_in_mode(layout):
                    for recompute in self._recompute_modes:
                        for comm, inner in self.exchanges(sizes.tp, sizes.cp):
                            found = layout._replace(recompute=recompute, cp_comm=comm, cp_a2a_size=inner)
                            if not layout.moe_overlap or overlaps_experts(found._replace(vpp=2)):
                                yield found

    def exchanges(self, tp: int, cp: int) -> Sequence[tuple[CpComm | None, int | None]]:
        """How ranks of cp may meet, with cp_a2a_size: the runtime's default (None), and exchanges of sequence for
        heads that send fewer bytes than it, of all ranks or of as many as an NVLink domain has."""
        if cp == 1:
            return [(None, None)]
        if "cp_comm" in self.fixed:
            comm, inner = self.fixed["cp_comm"], self.fixed.get("cp_a2a_size")
            parts = {"a2a": cp, "a2a+p2p": inner}.get(comm) or 1
            is_dealt = parts == 1 or deals_heads(self.model, tp, parts, repeats=self.runs.repeats_kv_heads)
            return [(comm, inner)] if is_dealt else []
        found: Sequence[tuple[CpComm | None, int | None]] = self._once(
            ("exchanges", tp, cp), lambda: [(None, None), *self._exchanges(tp, cp)]
        )
        return found

    def _exchanges(self, tp: int, cp: int) -> Iterator[tuple[CpComm, int | None]]:
        model, runs, job = self.model, self.runs.cp_comm, self.job
        is_plain = model.position not in ("relative", "alibi") and not (job.packed_attention and self.runs.launched)
        if not is_plain or (model.heads + model.kv_heads) >= cp * model.kv_heads:
            return
        sizes = [inner for inner in divisors(cp) if inner > 1 and deals_heads(model, tp, inner)]
        if "a2a" in runs and cp in sizes:
            yield "a2a", None
        inside = [inner for inner in sizes if inner < cp and tp * inner <= self.domain.ranks]
        if "a2a+p2p" in runs and inside and model.attention_window is None and not model.attention_sinks:
            yield "a2a+p2p", inside[-1]

    def _cuts_in_vain(self, cp: int, micro: int) -> bool:
        """Whether cp splits samples, in a model with experts, that replicas could take whole: half the
        cp and micro batch with twice the replicas have as many rows, micro batches and bytes, and
        exchange fewer keys and values."""
        is_free = self.fixed.keys().isdisjoint(("cp", "dp", "micro_batch_size"))
        return self.model.experts is not None and is_free and gcd(cp, micro) > 1

    @cached_property
    def tries_overlap(self) -> bool:
        """Whether to send one micro batch's rows to experts while another is computed, too: where that saves time and
        nothing fixes it. Layouts of the space do not; a search tries it on those that it found (find.py)."""
        gains = self.runs.expert_overlap and job_profile(self.job.training).experts.overlapped > 0
        return gains and self.model.experts is not None and "moe_overlap" not in self.fixed

    def microbatches(self, layout: LayoutSettings) -> int:
        """Micro batches of a replica in one step."""
        return max(1, (self._batch or layout.dp) // (layout.micro_batch_size * layout.dp))

    @cached_property
    def _batch(self) -> int | None:
        return self.job.training.global_batch_size

    @cached_property
    def _recompute_modes(self) -> list[str]:
        """The modes of recomputation to try: without selective where it saves no memory, as with
        fused attention, and only costs time."""
        modes = self._fixed_or("recompute", self.runs.recompute)
        if len(modes) < 2 or "selective" not in modes:
            return [*modes]
        layout = JobLayout.of(self.job_of(self.replicated._replace(recompute="selective")))
        shapes = activation_shapes(layout)
        spares = any(
            layer_activations(shapes, block).recomputed for stack in layout.table.stacks for block in stack.kinds
        )
        return [mode for mode in modes if spares or mode != "selective"]

    @property
    def replicated(self) -> LayoutSettings:
        """The layout that every job has: a replica of the full model on each rank."""
        return LayoutSettings(recompute="full").with_sizes({FILLING: self.world})

    def families(self, axes: LayoutSettings) -> Iterator[LayoutSettings]:
        """Every pipeline over these axes."""
        key = "pipelines", axes.pp, self.microbatches(axes)
        for vpp, schedule, balance in self._once(key, lambda: list(self.pipelines(*key[1:]))):
            family = axes._replace(vpp=vpp, schedule=schedule, stage_balance=balance)
            if runs_in_mode(family) and (not axes.moe_overlap or overlaps_experts(family)):
                yield family

    def members(self, family: LayoutSettings) -> Iterator[LayoutSettings]:
        """The layouts of a family: one for each choice of values of the member settings."""
        return (family._replace(**choice) for choice in self.choices(family))

    def choices(self, family: LayoutSettings) -> list[dict[str, Any]]:
        """The values of the member settings, and of zero_size, in each member. They are the same for all
        families with these sizes and tensor mode."""
        mode = family.tensor_mode, family.tensor_depth, family.sequence_parallel
        choices: list[dict[str, Any]] = self._once(
            ("choices", *family.rank_sizes, *mode), lambda: list(self._find_choices(family))
        )
        return choices

    def _find_choices(self, family: LayoutSettings) -> Iterator[dict[str, Any]]:
        names = [setting.name for setting in self.member_settings]
        for values in product(*(setting.values(self, family) for setting in self.member_settings)):
            choice: dict[str, Any] = dict(zip(names, values, strict=True))
            for size in self.zero_sizes(family._replace(**choice)):
                yield choice if size is None else {**choice, "zero_size": size}

    @cached_property
    def _cuts_states(self) -> bool:
        """Whether ZeRO may divide states over a part of the replicas: where these are in several
        NVLink domains, or the job fixes it."""
        leaves = self.runs.zero_sizes and self.domain.ranks < self.world
        return leaves or "zero_size" in self.fixed

    def zero_sizes(self, layout: LayoutSettings) -> list[int | None]:
        """Numbers of ranks to divide ZeRO's states over: all replicas (None), and those of a group
        that are in one NVLink domain, whose messages stay inside of it, where both views of the ranks
        have as many of these domains."""
        if "zero_size" in self.fixed:
            return [self.fixed["zero_size"]]
        if not layout.zero or not self._cuts_states:
            return [None]
        key = "share", *layout.sizes.values(), layout.order
        inside = self._once(key, lambda: self._in_domain(layout))
        cuts = 1 < inside < layout.replicas and not (self.runs.zero_over_cp and inside % layout.cp)
        if self.model.experts is not None:
            cuts = cuts and layout.edp % (layout.replicas // inside) == 0
        return [None, inside] if cuts else [None]

    def _in_domain(self, layout: LayoutSettings) -> int:
        """Consecutive ranks of a group of replicas that are in one domain.

        By hand, domains of 8 and tp 2, cp 2, dp 16: cp 2 x 2 of dp.
        """
        if not are_neighbours(layout.order, layout.sizes):
            return 1
        stride, inside = 1, 1
        for axis in used_axes(layout.order, layout.sizes):
            size = layout.sizes[axis]
            if axis in ("dp", "cp"):
                room = self.domain.ranks // stride if self.domain.ranks % stride == 0 else 1
                inside *= gcd(size, room)
                if room % size:
                    break
            stride *= size
        return inside

    def grids(self, tp: int) -> list[TensorGrid]:
        """The grids of `tp` tensor-parallel ranks to try, the row first."""
        grids: list[TensorGrid] = self._once(("grids", tp), lambda: list(self._find_grids(tp)))
        return grids

    def _find_grids(self, tp: int) -> Iterator[TensorGrid]:
        mode = self.fixed.get("tensor_mode")
        if mode in (None, "1d") and splits_heads(self.model, tp):
            yield TensorGrid("1d", {"tp": tp})
        for one in self.runs.tensor_modes if mode is None else [mode]:
            for depth in self._depths(one, tp) if one != "1d" else ():
                axes = grid_axes(one, tp, depth)
                if axes is not None and self._accepts(TensorGrid(one, axes), zero=0):
                    yield TensorGrid(one, axes)

    def _depths(self, mode: str, tp: int) -> list[int | None]:
        """The depths of 2.5d; without a fixed mode those from 2 on."""
        if mode != "2.5d":
            return [None]
        if self.fixed.get("tensor_depth"):
            return [self.fixed["tensor_depth"]]
        least = 1 if "tensor_mode" in self.fixed else 2
        return [depth for depth in grid_depths(tp) if depth >= least]

    def _accepts(self, grid: TensorGrid, *, zero: int) -> bool:
        """Whether the rules accept the grid in the plainest layout of the job: all other ranks are
        replicas, and a micro batch has one sample for each part."""
        dp, micro = self.world // grid.size, grid.sample_parts
        job = self.job_of(
            self.replicated._replace(
                tp=grid.size,
                dp=dp,
                zero=zero,
                micro_batch_size=micro,
                recompute="none",
                tensor_mode=grid.mode,
                tensor_depth=grid.axes.get("depth"),
            )
        )
        tables = {
            "parallel": job.parallel.model_copy(update={"allow_tp_across_nodes": True}),
            "training": job.training.model_copy(update={"global_batch_size": micro * dp}),
        }
        return not find_errors(job.model_copy(update=tables))

    def micro_batch_sizes(self, dp: int) -> Iterator[int]:
        """Sizes that divide a replica's share of the global batch."""
        batch = self.job.training.global_batch_size or dp
        if batch % dp == 0:
            for size in divisors(batch // dp):
                if self.admits("micro_batch_size", size):
                    yield size

    def sequence_parallel(self, grid: TensorGrid, cp: int) -> Sequence[bool]:
        """Off, and on where a row of ranks divides a rank's part of the sequence; on alone where
        the model has experts."""
        splits = grid.mode == "1d" and grid.size > 1 and self.runs.sequence
        splits = splits and splits_sequences(self.model, sequence_parts(grid.size, cp))
        legal = [False, True] if splits else [False]
        if self.model.experts and grid.size > 1:
            legal.remove(False)
        return self._fixed_or("sequence_parallel", legal)

    def pipelines(self, pp: int, microbatches: int) -> Iterator[tuple[int, ScheduleName, str]]:
        """(chunks a stage, schedule, stage balance) of `pp` stages. Several chunks are small and
        cut evenly; by cost only where their number is fixed."""
        too_few = self.runs.needs_full_pipeline and microbatches < pp - 1
        if too_few and "pp" not in self.fixed:
            return
        chunks = {*divisors(self.layers)}
        if self.runs.ends_as_layers:
            chunks.update(divisors(self.layers + 2))
        if self._cuts_freely:
            chunks.add(self.fixed.get("vpp", 1))
        for vpp in sorted(chunks):
            runs = vpp == 1 or self._runs("vpp", self.runs.chunks)
            too_many = pp * vpp > self.layers and not self.counts_ends(pp * vpp)
            if too_many or not runs or not self.admits("vpp", vpp):
                continue
            for schedule in self.schedules(pp, vpp):
                if is_schedule(schedule, stages=pp, microbatches=microbatches, chunks=vpp):
                    for balance in self._balances(pp, vpp):
                        yield vpp, schedule, balance

    def schedules(self, pp: int, vpp: int) -> Sequence[ScheduleName]:
        """The schedules to try. With chunks, 1f1b is the interleaved schedule, under the name that
        the job uses."""
        if "schedule" in self.fixed:
            return (self.fixed["schedule"],)
        fits = [name for name in self.runs.schedules if SCHEDULES[name].runs(vpp)]
        if vpp > 1:
            usual = "interleaved" if self.job.parallel.schedule == "interleaved" else "1f1b"
            return (usual, *(name for name in fits if SCHEDULES[name].is_v))
        return ("1f1b",) if pp == 1 else fits

    def _balances(self, pp: int, vpp: int) -> Iterator[str]:
        even = self.layers % (pp * vpp) == 0 or self.counts_ends(pp * vpp)
        if self.runs.fills_stages and pp > 1 and vpp == 1:
            even = self.fills(pp)
        cuts = self.runs.by_cost or (self._cuts_freely and not even)
        by_cost = cuts and pp > 1 and (vpp == 1 or "vpp" in self.fixed)
        legal = ["even"] * even + ["cost"] * by_cost
        if even or self.fixed.get("stage_balance") != "even":
            yield from self._fixed_or("stage_balance", legal)

    @cached_property
    def _cuts_freely(self) -> bool:
        """Whether layers that divide neither alone nor with the ends are cut by cost: those of a
        model with experts, whose software takes any layout (`spec.job.complete`)."""
        return self.model.experts is not None and self.runs.ends_as_layers

    def counts_ends(self, blocks: int) -> bool:
        """Whether embedding and loss are counted as layers, as where 126 layers on 8 stages of 8
        chunks are cut as 128."""
        find = ends_count_as_layers
        return bool(self._once(("ends", blocks), lambda: find(self.layers, blocks, self.job.training.runtime)))

    def fills(self, pp: int) -> bool:
        """Whether a runtime that fills stages one after the other gives each of them something."""
        return self.job.model is not None and job_cut(self.job.model, pp).loss_stage == pp - 1

    def zero_stages(self, family: LayoutSettings) -> list[int]:
        """ZeRO stages; 0 where no parameter has two replicas."""
        several = family.replicas > 1 or (self.model.experts is not None and family.edp > 1)
        stages = self.runs.zero if several else [0]
        if family.tensor_mode != "1d":
            stages = [stage for stage in stages if self._shards(family.grid, stage)]
        return list(self._fixed_or("zero", stages))

    def _shards(self, grid: TensorGrid, zero: int) -> bool:
        """Whether this ZeRO stage is available with the grid of a mode other than 1d."""
        key = "shards", grid.mode, *grid.axes.values(), zero
        return bool(self._once(key, lambda: self._accepts(grid, zero=zero)))

    def orders(self, family: LayoutSettings) -> Sequence[str]:
        """Orders of the axes over ranks that the runtime has: tp first, then the others that place
        ranks differently in NVLink domains; orders equal to the default have its name."""
        if "order" in self.fixed:
            return [self.fixed["order"]]
        if self.domain.ranks >= self.world:
            return [DEFAULT_ORDER]
        orders = _orders(family[: len(AXES)], tuple(self.runs.orders or ()))
        if self.model.experts is None:
            return orders
        sizes, experts = family.sizes, family.expert_sizes
        return [order for order in orders if views_agree(sizes, experts, order)]

    def _fixed_or(self, name: str, legal: Sequence[Any]) -> Sequence[Any]:
        """The value that is fixed, which the rules decide on, else the legal ones."""
        return [self.fixed[name]] if name in self.fixed else legal

    def admits(self, name: str, value: Any) -> bool:
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
        ends = ends and layout.pipeline_layout is None
        values |= dict.fromkeys(("first_stage_layers", "last_stage_layers"))
        values |= dict.fromkeys(("embedding_is_layer", "loss_is_layer"), ends)
        key = ("training", layout.sequence_parallel, *training.values())
        tables = {
            "parallel": self.job.parallel.model_copy(update=values),
            "training": self._once(key, lambda: self._training(layout, training)),
        }
        return self.job.model_copy(update=tables)

    def _training(self, layout: LayoutSettings, changes: dict[str, Any]) -> TrainingSpec:
        given, is_full = self.job.training, layout.recompute == "full"
        partitions = is_full and given.partition_activations and not layout.sequence_parallel
        offloads = is_full and given.offload_activations
        changes |= {"offload_activations": offloads, "partition_activations": partitions}
        return given.model_copy(update=changes)


MEMBER_SETTINGS = (MemberSetting("zero", SearchSpace.zero_stages), MemberSetting("order", SearchSpace.orders))


@lru_cache(maxsize=4096)
def _orders(axis_sizes: tuple[int, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """The orders of axes of these sizes that place ranks differently, by the runtime's names for
    them; all of them where its preset does not list them."""
    sizes = dict(zip(AXIS_NAMES, axis_sizes, strict=True))
    first, *others = AXIS_NAMES
    outer = [axis for axis in others if sizes[axis] > 1]
    if len(outer) < 2:
        return (DEFAULT_ORDER,)
    idle = [axis for axis in others if axis not in outer]
    turns = ["-".join((first, *idle, *turn)) for turn in permutations(outer)]
    names = known or (DEFAULT_ORDER, *turns)
    return tuple(name for turn in turns if (name := find_order(turn, names, sizes)))


def overlaps_experts(layout: LayoutSettings) -> bool:
    """Whether one micro batch's rows can be sent to experts while another is computed: rows are sent, not sent again
    for the backward, and a stage has several chunks, one forward and one backward."""
    return layout.ep > 1 and layout.recompute != "full" and (layout.pp == 1 or layout.vpp > 1)


def runs_in_mode(layout: LayoutSettings) -> bool:
    """Whether the layout's tensor mode runs its other settings."""
    return layout.tensor_mode == "1d" or not settings_of_1d(
        sequence_parallel=layout.sequence_parallel, cp=layout.cp, schedule=layout.schedule
    )
