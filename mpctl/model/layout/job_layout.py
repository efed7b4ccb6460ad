"""A job with everything that its layout determines, as one frozen value.

The planner and the workers read the same `JobLayout`: the operator table with frozen parameters
marked, which layers each pipeline stage and chunk holds, which ranks hold the same parameters,
which ZeRO stage is in effect, and which gradients are reduced together. It is built once from a
complete job and passed on; what is costly is computed when it is first used.

By hand, GPT of 4 layers with a tied head, tp 2, pp 2 and dp 4 on 16 ranks: stages [[(0, 2)],
[(2, 4)]], 4 replicas, and `embedding.word.weight` is held by stages 0 and 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, TypeVar

from mpctl.core.axes import CP_GROUPS
from mpctl.core.errors import InputError
from mpctl.core.sharding import DENSE, View, Views
from mpctl.core.tensor_grid import TensorGrid
from mpctl.core.topology import Topology
from mpctl.core.units import plural
from mpctl.model.families import get_table
from mpctl.model.layout.buckets import Bucket, BucketRules, BucketShape, bucket_shapes, layer_units, stage_buckets
from mpctl.model.layout.topology import dense_view, job_grid, job_topology, join_zero_groups, other_views
from mpctl.model.operators.matmul import Dims, ParameterSpec
from mpctl.model.operators.table import OperatorTable, StageSlice, named_weights
from mpctl.model.pipeline.explicit import find_layout, separates_prediction
from mpctl.model.pipeline.filled import FilledCut, is_filled, job_cut
from mpctl.model.pipeline.placement import StageChunk, StagePlacement
from mpctl.model.pipeline.stages import Span, job_stages
from mpctl.spec.cluster import ClusterSpec
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.spec.runtime import RuntimeProfile, is_launched, job_profile
from mpctl.spec.schedules import SCHEDULES

STATUS_FIELDS = 2
"""float64 numbers of a step's status that are not one rank's own: the loss, whether to stop."""

NORM_FIELDS = 1
"""Further ones of a training step: the gradient norm."""

ROUTING_FIELDS = 2
"""Further ones of a training step of a model with experts: the auxiliary loss, near ties."""

AMAX_BYTES = 3 * 4
"""float32 numbers of a linear layer in fp8: the largest elements of X, W and dY."""

MAX_SENDS_IN_FLIGHT = 2
"""Messages to other pipeline stages whose tensors a rank keeps until they have been sent."""

Stages = tuple[tuple[Span, ...], ...]
Value = TypeVar("Value")


class Border(NamedTuple):
    """The tensors between two chunks: dimensions of each, and whether its gradient is sent back."""

    dims: tuple[Dims, ...]
    needs: tuple[bool, ...]


class ChunkClass(NamedTuple):
    """layers: runs of (kind, number of layers) in order (OperatorTable.layer_kinds). ends: of each
    stack that is met, its name, and whether its entry and its exit are here."""

    layers: tuple[tuple[int, int], ...]
    ends: tuple[tuple[str, bool, bool], ...]


class StageClass(NamedTuple):
    """Properties of equal pipeline stages: they have parameters of the same shapes, messages of the same
    bytes, and take equally long.

    shared: parameters that other stages also hold. has_loss: whether the stage computes the loss.
    turns: whether it hands over to itself, as the last one of a V does.

    By hand, 8 equal layers on 4 stages with tied embeddings: the first, the last, and the two
    between them, which are equal.
    """

    chunks: tuple[ChunkClass, ...]
    shared: tuple[str, ...]
    has_loss: bool
    turns: bool = False


@dataclass(frozen=True, repr=False)
class JobLayout:
    """A complete job, its model, and everything that these determine.

    job: with every blank filled in (`spec.job.complete`). table: the model's operators, with the
    patterns of `training.freeze` applied. stages: half-open spans of layers by [stage][chunk].
    other_views: views of parameters that are sharded differently from the dense ones.
    """

    job: JobSpec
    model: ModelSpec
    table: OperatorTable
    stages: Stages
    other_views: tuple[View, ...] = ()

    def __repr__(self) -> str:
        layers = f"{plural(self.table.layers, 'layer')} in {plural(len(self.stages), 'stage')}"
        return f"JobLayout({self.job.label}, {layers})"

    @classmethod
    def of(cls, job: JobSpec) -> JobLayout:
        """The layout of a complete job. Raises InputError without a model and UnevenLayersError
        where the layers cannot be divided over the stages."""
        if job.model is None:
            raise InputError.of("no-model", "model", "a layout needs a model", "name one: model")
        table = get_table(
            job.model,
            tp=job.parallel.tp,
            freeze=job.training.freeze,
            adapter=job.training.adapter,
            packed=job.packed_attention,
            apart=separates_prediction(job),
        )
        return cls.assemble(job, job.model, table, job_stages(job, table.layers))

    @classmethod
    def assemble(
        cls, job: JobSpec, model: ModelSpec, table: OperatorTable, stages: Iterable[Iterable[Span]], **known: object
    ) -> JobLayout:
        """A layout from parts that are known already, as a search shares them between layouts.
        known: values of cached properties that need no computation."""
        layout = cls(job, model, table, tuple(map(tuple, stages)), other_views(job))
        vars(layout).update(known)
        return layout

    @property
    def reads_base(self) -> bool:
        """Whether checkpoints leave out the frozen base of adapters, which lies at training.init_from. Other
        launchers' plans need not name it."""
        training = self.job.training
        return training.adapter is not None and (training.init_from is not None or not is_launched(training.runtime))

    def is_saved(self, name: str) -> bool:
        """Whether checkpoints hold a parameter."""
        return not (self.reads_base and self.table.is_frozen(name))

    def with_cluster(self, cluster: ClusterSpec) -> JobLayout:
        """The same layout on a cluster of the same sizes, with other figures: values computed for
        this layout are reused."""
        return self._with_job(cluster=cluster)

    def with_moe_load(self, load: float) -> JobLayout:
        """The same layout with this load stated for its fullest rank of experts."""
        return self._with_job(training=self.job.training.model_copy(update={"moe_load": load}))

    def _with_job(self, **tables: object) -> JobLayout:
        other = replace(self, job=self.job.model_copy(update=tables))
        vars(other).update({name: value for name, value in vars(self).items() if name != "job"})
        return other

    def with_micro_batch_size(self, size: int) -> JobLayout:
        """The same layout for micro batches of another number of samples."""
        training = self.job.training.model_copy(update={"micro_batch_size": size})
        return replace(self, job=self.job.model_copy(update={"training": training}))

    @cached_property
    def topology(self) -> Topology:
        """Position of every rank along the axes of every view."""
        topology, known = job_topology(self.job), {view.name for view in other_views(self.job)}
        for view in self.other_views:
            if view.name not in known:
                cutting = {view.shard_group: tuple(view.grid.axes)}
                unions = cutting if len(view.grid.axes) > 1 else {}
                seen = topology.view(view.sizes, order="-".join(view.sizes), unions=unions)
                topology = join_zero_groups(topology.joined(seen), [view])
        return topology

    @cached_property
    def views(self) -> Views:
        """How the ranks hold parameters, by the name of the view."""
        dense = dense_view(self.job)
        return {view.name: view for view in (dense, *self.other_views)}

    @property
    def dense(self) -> View:
        """How the ranks hold the parameters of dense layers."""
        return self.views[DENSE]

    @cached_property
    def grid(self) -> TensorGrid:
        """The tensor-parallel ranks as a grid: what cuts activations and dense weights."""
        return job_grid(self.job)

    @property
    def last_stage(self) -> int:
        """Number of the pipeline's last stage."""
        return len(self.stages) - 1

    @cached_property
    def placement(self) -> StagePlacement:
        """The stage and chunk of each virtual stage."""
        return StagePlacement.of(self.job.parallel)

    @property
    def head_stage(self) -> int:
        """Number of the stage that has the output head: that of the last virtual stage, unless the
        runtime fills stages one after the other (model/pipeline/filled.py)."""
        return self._cut.head_stage if self._cut else self.placement.last.stage

    @property
    def loss_stage(self) -> int:
        """Number of the stage that computes the loss: the head's, or the one that it sends the
        logits to."""
        return self._cut.loss_stage if self._cut else self.placement.last.stage

    @cached_property
    def _cut(self) -> FilledCut | None:
        return job_cut(self.model, self.job.parallel.pp) if is_filled(self.job) else None

    @cached_property
    def profile(self) -> RuntimeProfile:
        """The profile of the software that runs the job (`training.runtime`)."""
        return job_profile(self.job.training)

    @property
    def kv_copies(self) -> int:
        """Copies of each kv head that ranks of cp exchange (parallel.cp_comm): one for each rank that shares it.

        By hand, 2 kv heads: 1 for cp 2 by a2a, 4 for cp 8, of which tp 2 leaves each rank one head and 8.
        """
        p = self.job.parallel
        return max(1, p.head_parts // max(1, self.model.kv_heads // p.tp))

    @cached_property
    def num_microbatches(self) -> int:
        """Micro batches of one step, on each pipeline."""
        return self.job.num_microbatches

    @cached_property
    def holds_fp8_weights(self) -> bool:
        """Whether weights are cast to fp8 once a step and kept until it ends: where the runtime
        holds them, several micro batches use them, and no view of the ranks gathers parameters for
        each of these (ZeRO 3)."""
        holds = self.profile.operators.casts_weights == "held" and self.job.training.dtype == "fp8"
        gathers = any(view.zero == 3 for view in self.views.values())
        return holds and self.num_microbatches > 1 and not gathers

    @cached_property
    def global_batch_size(self) -> int:
        """Samples of one step, over all replicas."""
        training = self.job.training
        return training.global_batch_size or training.micro_batch_size * self.job.sizes["dp"]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step, over all replicas; of an encoder-decoder those of both sequences."""
        return self.global_batch_size * self.model.tokens_per_sample

    @cached_property
    def group_sizes(self) -> Mapping[str, int]:
        """Ranks of each group that messages go over, by the names that plans print: the axes, the
        groups of replicas and of shards, and `world`; those of tp's grid are `TensorGrid.groups`.
        """
        grid = {name: self.grid.parts(axes) for name, axes in self.grid.groups.items()}
        others = {axis: size for view in self.other_views for axis, size in view.sizes.items()}
        shards = {view.shard_group: view.grid.size for view in self.other_views}
        replicas = {view.replica_group: view.replicas for view in self.views.values()}
        for view in self.views.values():
            if view.copies > 1:
                replicas |= {view.zero_group: view.zero_size, view.copies_group: view.copies}
        p = self.job.parallel
        rings = dict(zip(CP_GROUPS, (p.head_parts, p.cp // p.head_parts), strict=True)) if p.cp_a2a_size else {}
        sizes = {**others, **shards, **self.job.sizes, **grid, **replicas, **rings}
        return {**sizes, "world": self.job.world_size}

    @cached_property
    def stage_classes(self) -> tuple[StageClass, ...]:
        """The class of each stage."""
        return self.table.once(
            ("classes", self.stages, self.head_stage, self.loss_stage, self.prediction_place),
            lambda: tuple([self._stage_class(stage) for stage in range(len(self.stages))]),
        )

    def _stage_class(self, stage: int) -> StageClass:
        kinds, shared = self.table.layer_kinds, self.shared_parameters
        chunks = (
            ChunkClass(
                tuple((kind, len(list(run))) for kind, run in groupby(kinds[start:stop])),
                tuple((part.stack.prefix, part.has_entry, part.has_exit) for part in slices),
            )
            for (start, stop), slices in zip(self.stages[stage], self.chunks(stage), strict=True)
        )
        names = tuple(name for name, stages in shared.items() if stage in stages)
        turns = self.placement.is_v and stage == self.last_stage
        return StageClass(tuple(chunks), names, stage == self.loss_stage, turns)

    def of_stages(self, find: Callable[[int], Value]) -> list[Value]:
        """`find` of every stage, called once for those that are alike."""
        found = {first: find(first) for first in self.first_stages}
        return [found[first] for first in self._first_alike]

    @cached_property
    def first_stages(self) -> tuple[int, ...]:
        """The first stage of each class."""
        return tuple(dict.fromkeys(self._first_alike))

    @cached_property
    def _first_alike(self) -> tuple[int, ...]:
        """First stage of each stage's class."""
        first: dict[StageClass, int] = {}
        return tuple([first.setdefault(alike, stage) for stage, alike in enumerate(self.stage_classes)])

    def chunks(self, stage: int) -> tuple[tuple[StageSlice, ...], ...]:
        """Return the part of each layer stack that each chunk of a stage holds."""
        spans, is_first, is_last = self.stages[stage], stage == 0, stage == self.head_stage
        place, last = self.prediction_place, len(spans) - 1
        predicting = place[1] if place is not None and place[0] == stage else None
        return self.table.once(
            ("chunks", spans, is_first, is_last, predicting),
            lambda: tuple(
                self.table.stage_slices(
                    [span],
                    is_first=is_first and chunk == 0,  # others may be empty and begin at layer 0 too
                    is_last=is_last and chunk == last,
                    predicts=chunk == predicting,
                )
                for chunk, span in enumerate(spans)
            ),
        )

    @cached_property
    def prediction_place(self) -> StageChunk | None:
        """(stage, chunk) of layers of multi-token prediction that run apart from the loss."""
        layout = find_layout(self.job) if self.table.predictions else None
        if layout is None:
            return None
        return self.placement.place(layout.prediction_parts[0])

    def border(self, stage: int, chunk: int, *, after: bool) -> Border:
        """The tensors that a chunk sends to the next one (after), or receives from the one before."""
        place, layer = self.prediction_place, self.stages[stage][chunk][after]
        predicted = False
        if place is not None:
            virtual = self.placement.virtual
            predicted = (virtual(StageChunk(stage, chunk)), after) >= (virtual(place), True)
        table = self.table
        return Border(table.boundary(layer, predicted=predicted), table.boundary_needs(layer, predicted=predicted))

    def chunk_slices(self, stage: int, chunk: int) -> tuple[StageSlice, ...]:
        """The part of each layer stack that one chunk of a stage holds."""
        return self.chunks(stage)[chunk]

    def stage_slices(self, stage: int) -> list[StageSlice]:
        """The parts of each layer stack that a stage holds, chunk by chunk."""
        return [part for slices in self.chunks(stage) for part in slices]

    def stage_parameters(self, stage: int) -> Iterator[ParameterSpec]:
        """Every parameter of a stage under its global name, once each."""
        return named_weights(self.stage_slices(stage))

    @cached_property
    def shared_parameters(self) -> Mapping[str, tuple[int, ...]]:
        """Stages of each parameter that several stages hold (a tied word table, a bias that all
        layers of a stack add), by name. Parameters of a single layer are never among them."""
        return self.table.once(("shared", self.stages, self.head_stage, self.prediction_place), self._find_shared)

    def _find_shared(self) -> dict[str, tuple[int, ...]]:
        stages: dict[str, tuple[int, ...]] = {}
        for stage in range(len(self.stages)):
            weights = (w for part in self.stage_slices(stage) for w in part.end_weights())
            for name in dict.fromkeys(weight.name for weight in weights):
                stages[name] = (*stages.get(name, ()), stage)
        return {name: stages for name, stages in stages.items() if len(stages) > 1}

    def buckets(self, stage: int) -> tuple[Bucket, ...]:
        """The gradients of a stage that are reduced together, in the order of their reduction."""
        return stage_buckets(self.chunks(stage), self._bucket_rules, self.shared_parameters)

    def bucket_shapes(self, stage: int) -> Counter[BucketShape]:
        """Count the buckets of each shape that `buckets` has for a stage, without naming parameters."""
        rules, shared = self._bucket_rules, self.shared_parameters
        held = tuple((name, view.grid, view.zero == 3) for name, view in self.views.items())
        return self.table.once(
            ("buckets", self.stage_classes[stage], held, rules.max_elements, *shared.items()),
            lambda: bucket_shapes(self.chunks(stage), rules, shared),
        )

    @cached_property
    def _bucket_rules(self) -> BucketRules:
        parallel, training = self.job.parallel, self.job.training
        return BucketRules(
            views=self.views,
            max_elements=parallel.bucket_bytes // training.reduced_bytes,
            is_frozen=self.table.is_frozen,
            whole=frozenset() if self.profile.adapters.shards_quantized else self.table.quantized_names,
        )

    def layer_units(self, stage: int, chunk: int) -> dict[str, int]:
        """The number of each layer module among its chunk's units (model/layout/buckets.py), by module
        name, in forward order."""
        return layer_units(self.chunk_slices(stage, chunk))


def why_not_whole(job: JobSpec) -> Iterator[str]:
    """The settings because of which `launch.compile` compiles layers in pieces; none if it compiles
    full layers.

    torch.compile cannot trace messages or deferred weight gradients; casts to fp8 record maxima in
    memory that the backward of a full layer would need unchanged; the rows of an expert are a
    different number in each micro batch.
    """
    parallel = job.parallel
    if parallel.tp > 1:
        yield f"parallel.tp {parallel.tp}"
    if parallel.cp > 1:
        yield f"parallel.cp {parallel.cp}"
    if parallel.pp > 1 and SCHEDULES[parallel.schedule].splits_backward:
        yield f"parallel.schedule {parallel.schedule}"
    if job.training.dtype == "fp8":
        yield "training.dtype fp8"
    if job.has_experts:
        yield "model.experts"


def compiles_whole_layers(job: JobSpec) -> bool:
    """Whether a layer of the job is one function of tensors."""
    return not any(why_not_whole(job))
