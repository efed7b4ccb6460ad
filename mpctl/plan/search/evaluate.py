"""Exact seconds and bytes of layouts, equal to those of `mpctl plan`, at a part of its cost.

A layer's seconds depend on the `layer_key` of a layout and on the placement of tp and cp; a network
on axis sizes and their order; the stages on the rule that cuts the layers. Each is computed once
and shared by all layouts that have it. A LayoutEvaluator is made for one search.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from math import ceil, gcd
from typing import Any, NamedTuple, TypeVar

from mpctl.core.axes import CP_GROUPS
from mpctl.core.sharding import EXPERTS
from mpctl.core.units import PRODUCT_BYTES
from mpctl.model.families import get_table
from mpctl.model.layout.draft import LayoutDraft
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.layout.topology import job_topology
from mpctl.model.operators.activation_shapes import ActivationShapes
from mpctl.model.operators.layer import OperatorGroup
from mpctl.model.operators.table import OperatorTable
from mpctl.model.pipeline.costs import job_costs
from mpctl.model.pipeline.schedule.orders import peak_in_flight, warmup
from mpctl.model.pipeline.stages import Span, job_stages
from mpctl.plan.estimate.activation_shapes import activation_shapes, adds_products
from mpctl.plan.estimate.activations import layer_bytes
from mpctl.plan.estimate.communication import gradient_bytes, local_parameters, local_sizes
from mpctl.plan.estimate.kernels import MissingFigure, Speed, device_speed
from mpctl.plan.estimate.libraries import Communicators
from mpctl.plan.estimate.memory import KnownMemory, LayoutMemory, peak_bytes
from mpctl.plan.estimate.messages import StepMessages
from mpctl.plan.estimate.network import MissingLink, Network
from mpctl.plan.estimate.operator_times import KnownTimes, OperatorTimer, casts_shared
from mpctl.plan.estimate.routing import buffered_layout, loaded_layout
from mpctl.plan.estimate.step import StepTime
from mpctl.plan.estimate.system import System, find_system
from mpctl.plan.estimate.time import StepTimeModel
from mpctl.plan.planning.layout_settings import LayoutSettings
from mpctl.plan.rules.validate import find_errors
from mpctl.plan.search.space import SearchSpace
from mpctl.spec.cluster import Link
from mpctl.spec.job import JobSpec
from mpctl.spec.layout_text import parse_layout
from mpctl.spec.runtime import RuntimeProfile, job_profile
from mpctl.spec.schedules import SCHEDULES

Value = TypeVar("Value")
Stages = list[list[Span]]
SLACK = 1 - 1e-9  # for bounds: the same sums in another order differ by rounding


class FirstStage(NamedTuple):
    """Memory of a layout's first stage, bytes, before ZeRO shards any of it.

    states: optimizer, gradients and parameters; experts: the share of each that is of experts, and
    which other replicas shard; other: everything else that is allocated; slack: reserved bytes for
    each allocated one; context: outside of the allocator.
    """

    states: tuple[int, int, int]
    experts: tuple[float, float, float]
    other: int
    slack: float
    context: int


class _SharedTimes(dict[int, Value]):
    """Times by the id of a layer or end: those of `shared_ids` are kept in `shared`."""

    def __init__(self, own: dict[int, Value], shared: dict[int, Value], shared_ids: frozenset[int]) -> None:
        self.own, self.shared, self.shared_ids = own, shared, shared_ids

    def get(self, key: int, default: Any = None) -> Any:
        """The time of a layer or an end, if it is known."""
        return (self.shared if key in self.shared_ids else self.own).get(key, default)

    def __setitem__(self, key: int, value: Value) -> None:
        (self.shared if key in self.shared_ids else self.own)[key] = value


class LayoutEvaluator:
    """Seconds and bytes of the layouts of one space, which share tables, networks, stages and layer
    times. Raises MissingFigure where the device states no rate, so that no time can be stated."""

    def __init__(self, space: SearchSpace) -> None:
        job = space.job
        if job.cluster.device is None:
            raise MissingFigure("no cluster.device is named")
        self.space, self.model = space, space.model
        self.profile: RuntimeProfile = job_profile(job.training)
        self.system: System = find_system(job.cluster, self.profile)
        self.speed: Speed = device_speed(job.cluster, job.training.chosen_dtype, self.system.factor)
        self.usable_memory: int = job.cluster.usable_bytes or 0
        self.device_memory: int = job.cluster.device.memory_bytes
        self.cache: dict[Hashable, Any] = {}
        self.known_memory = KnownMemory({}, {})

    def cached(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of `make`, which is called once for each key."""
        value = self.cache.get(key)
        if value is None:
            value = self.cache[key] = make()
        return value

    def table(self, tp: int, *, apart: bool = False) -> OperatorTable:
        """The model's operators on tp ranks. apart: layers of multi-token prediction are in another stage
        than the loss."""
        job = self.space.job
        freeze, adapter, packed = job.training.freeze, job.training.adapter, job.packed_attention
        return self.cached(
            ("table", tp, apart),
            lambda: get_table(self.model, tp=tp, freeze=freeze, adapter=adapter, packed=packed, apart=apart),
        )

    def _table(self, layout: LayoutSettings) -> OperatorTable:
        text = layout.pipeline_layout
        return self.table(layout.tp, apart=text is not None and parse_layout(text).separates_prediction)

    def network(self, layout: LayoutSettings) -> Network:
        """The links of the cluster as the layout's groups use them."""
        mode = layout.tensor_mode, layout.tensor_depth
        key = (*layout.rank_sizes, layout.order, *mode, layout.copies, layout.cp_a2a_size)
        return self.cached(key, lambda: self._network(layout))

    def _network(self, layout: LayoutSettings) -> Network:
        job = self.space.job_of(layout)
        return Network(job.cluster, job_topology(job), self.system)

    def job_layout(self, layout: LayoutSettings) -> JobLayout:
        """The space's job under this layout, with the table and the stages that others share."""
        job = self.space.job_of(layout)
        return JobLayout.assemble(job, self.model, self._table(layout), self.stages(job, layout), profile=self.profile)

    def is_legal(self, layout: LayoutSettings) -> bool:
        """Whether every rule accepts the layout."""
        job = self.space.job_of(layout)
        stages = self.stages(job, layout)
        return not find_errors(job, draft=LayoutDraft(job, table=self._table(layout), stages=stages))

    def timer(self, layout: LayoutSettings, job_layout: JobLayout) -> OperatorTimer:
        """The timer of the layout's layers and ends. Layouts of one layer key and the same routes
        share the times of layers; of as many rows in a micro batch, all but attention's; of any ep
        and etp, those of what has no experts."""
        network = self.network(layout)
        try:
            over_tp = tuple(network.route(axis) for axis in ("tp", *job_layout.grid.groups))
            of_experts = ("ep", "etp", "etp_ep") if job_layout.other_views else ()
            over_ep = tuple(map(network.route, of_experts))
            over_cp = tuple(network.route(axis) for axis in ("cp", *(CP_GROUPS if layout.cp_a2a_size else ())))
        except MissingLink:  # raised again when the seconds of such a message are needed
            return OperatorTimer(job_layout, self.speed, network, self.profile)
        # operands of low-precision products may be cast once a step, and gradients be added by
        # the products themselves
        casts = casts_shared(job_layout, self.profile) if self._is_narrow else 0
        step = casts, adds_products(job_layout)
        key = (layout.layer_key, over_tp, over_ep, over_cp, step)
        known = self.cache.get(key)
        if known is None:
            known = self._known_times(layout, job_layout, over_tp, over_ep, over_cp, step)
            if of_experts:
                dense = layout._replace(ep=1, etp=1)
                plain = (dense.layer_key, over_tp, (), over_cp, step)
                shared = self.cached(plain, lambda: self._known_times(dense, job_layout, over_tp, (), over_cp, step))
                flows = self._without_experts(job_layout.table)
                known = KnownTimes(
                    _SharedTimes(known.linear, shared.linear, flows),
                    _SharedTimes(known.ends, shared.ends, flows),
                    _SharedTimes(known.blocks, shared.blocks, flows),
                )
            self.cache[key] = known
        return OperatorTimer(job_layout, self.speed, network, self.profile, known)

    def _known_times(self, layout: LayoutSettings, job_layout: JobLayout, *routes_and_step: Hashable) -> KnownTimes:
        """Times to be shared by layouts of this layer key: those of linear layers with all of as
        many rows, unless ranks of cp compute keys and values of each other's rows (latent
        attention), or samples are counted (experts)."""
        over_tp, over_ep, _, step = routes_and_step
        sizes = local_sizes(job_layout)
        rows = tuple(sizes["batch"] * sizes[seq] for seq in ("seq", "decoder_seq"))
        counts_rows = not (self.model.is_mla or over_ep)
        one = layout._replace(cp=1, cp_comm=None, cp_a2a_size=None, micro_batch_size=1) if counts_rows else layout
        of_rows = (one.layer_key, rows, over_tp, over_ep, step)
        linear = self.cached(of_rows, lambda: KnownTimes({}, {}, {}))
        has_cores = any(end.cores for flow in job_layout.table.flows for end in flow.ends)
        return KnownTimes(linear.linear, {} if has_cores else linear.ends, {})

    def _without_experts(self, table: OperatorTable) -> frozenset[int]:
        """The layers and ends that have no experts, by id."""
        flows = [flow for stack in table.flows for flow in (*stack.ends, *(k for _, k in stack.runs))]
        return self.cached(
            ("without experts", id(table)), lambda: frozenset(id(flow) for flow in flows if not flow.part.has_experts)
        )

    @cached_property
    def _is_narrow(self) -> bool:
        return self.space.job.training.dtype in PRODUCT_BYTES

    @cached_property
    def message_widths(self) -> tuple[int, int]:
        """Bytes of a parameter and of a gradient in a message."""
        training = self.space.job.training
        return training.value_bytes, gradient_bytes(training, self.profile)

    def stages_key(self, layout: LayoutSettings) -> tuple[Hashable, ...]:
        """Return the key that determines the stages. Stages of equal compute depend on the cost ratios
        of the layers, which the batch does not change."""
        if layout.pipeline_layout is not None:
            return layout.pp, layout.pipeline_layout
        is_v = SCHEDULES[layout.schedule].is_v
        key = (layout.pp, layout.vpp, layout.stage_balance, is_v)
        if layout.stage_balance == "even":
            return key
        recompute = "full" if layout.recompute == "full" else "none"
        one = layout._replace(micro_batch_size=1, recompute=recompute)
        return (*key, self.cached(("costs", *one.layer_key), lambda: self._relative_costs(layout)))

    def _relative_costs(self, layout: LayoutSettings) -> tuple[int, ...]:
        costs = job_costs(self.space.job_of(layout._replace(micro_batch_size=1)))
        every = (costs.entry, *costs.layers, costs.exit)
        unit = gcd(*every) or 1
        return tuple(cost // unit for cost in every)

    def stages(self, job: JobSpec, layout: LayoutSettings) -> Stages:
        """The layers of every stage and chunk."""
        key = ("stages", *self.stages_key(layout))
        return self.cached(key, lambda: job_stages(job, self.model.all_layers))

    def step_time(self, layout: LayoutSettings) -> StepTime | None:
        """The step's time as `mpctl plan` states it; None where the cluster does not state the
        bandwidth of a link that this layout needs."""
        try:
            return self._time_model(layout).step()
        except MissingLink:
            return None

    def step_seconds(self, layout: LayoutSettings) -> float | None:
        """The total of `step_time`, up to rounding, without computing its parts."""
        try:
            return self._time_model(layout).seconds
        except MissingLink:
            return None

    def _time_model(self, layout: LayoutSettings) -> StepTimeModel:
        job_layout = self.job_layout(layout)
        key = ("messages", layout._replace(order="", moe_overlap=False))
        listed = self.cached(key, lambda: StepMessages(job_layout, self.profile))
        return StepTimeModel(job_layout, self.timer(layout, job_layout), listed)

    def device_bytes(self, layout: LayoutSettings) -> int:
        """Peak memory on the device of the fullest rank, bytes. It does not depend on the order of
        axes."""
        key = layout._replace(order="")
        return self.cached(key, lambda: self._peak_bytes(layout))

    def _peak_bytes(self, layout: LayoutSettings) -> int:
        memory = self._memory(layout, self._communicators(layout))
        # of equal stages the first holds the most micro batches, unless weight gradients are deferred
        stages = range(layout.pp) if memory.splits_backward else memory.layout.first_stages
        return peak_bytes(memory.of_stage(stage) for stage in stages)

    def _communicators(self, layout: LayoutSettings) -> Communicators:
        """Return the communicators, shared by all layouts with the same groups."""
        mode = layout.tensor_mode, layout.tensor_depth, layout.sequence_parallel
        key = ("communicators", *layout.rank_sizes, *mode, layout.copies, layout.zero > 0, layout.cp_a2a_size)
        return self.cached(key, lambda: Communicators(self.job_layout(layout)))

    def _memory(self, layout: LayoutSettings, communicators: Communicators | None = None) -> LayoutMemory:
        job_layout = self.job_layout(layout)
        shapes: ActivationShapes = self.cached(
            (layout.layer_key, "shapes", adds_products(job_layout)),
            lambda: activation_shapes(buffered_layout(loaded_layout(job_layout))),
        )
        return LayoutMemory(job_layout, shapes, self.known_memory, communicators)

    def min_bytes(self, layout: LayoutSettings, zero: int) -> float:
        """Bytes that the fullest rank needs at least under this ZeRO stage: the first stage's, its
        sharded states without padding and without gathered parts."""
        plain = layout._replace(zero=0, zero_size=None, order="")
        first = self.cached((plain, "first stage"), lambda: self._first_stage(plain))
        parts, has_experts = layout.replicas // layout.copies, any(first.experts)
        states = sum(size / parts if zero > at else size for at, size in enumerate(first.states))
        if has_experts:  # which other replicas share
            shares = zip(first.states[:zero], first.experts[:zero], strict=True)
            of_experts = sum(size * share for size, share in shares)
            shared = layout.edp // gcd(layout.copies, layout.edp)
            states += of_experts * (1 / shared - 1 / parts)
        return SLACK * (states + first.other) * first.slack + first.context

    def least_bytes(self, family: LayoutSettings) -> float:
        """Return a quick lower bound of `min_bytes`: what layers save of the micro batches in flight on the
        first stage. By hand, 3 layers a stage that save 2 each, 4 micro batches in flight: 24."""
        splits = SCHEDULES[family.schedule].splits_backward
        shapes: ActivationShapes = self.cached(
            ("shapes", family.layer_key, splits), lambda: activation_shapes(self.job_layout(family))
        )
        key = ("first chunks", family.tp, *self.stages_key(family))
        chunks = self.cached(key, lambda: self._first_chunks(family))
        saved = min(sum(number * layer_bytes(shapes, block).saved for block, number in layers) for layers in chunks)
        microbatches = self.space.microbatches(family)
        held = min(family.pp, microbatches)
        if family.pp > 1 and not splits:
            place = {"stage": 0, "stages": family.pp, "chunks": family.vpp}
            held = peak_in_flight(family.schedule, **place, microbatches=microbatches)
        if SCHEDULES[family.schedule].is_v:  # its forwards before anything is freed
            held = warmup(family.schedule, stage=0, stages=family.pp, microbatches=microbatches, chunks=family.vpp)
        slack, context = self.overhead
        return SLACK * held * saved * slack + context

    def _first_chunks(self, family: LayoutSettings) -> set[tuple[tuple[OperatorGroup, int], ...]]:
        """The kinds of layers in the chunks of the first stage, with their numbers."""
        chunks = self.job_layout(family).chunks(0)
        return {tuple(kind for part in slices for kind in part.part.layers) for slices in chunks}

    @cached_property
    def overhead(self) -> tuple[float, float]:
        """Reserved bytes for each allocated one, and bytes outside of the allocator."""
        whole = self._whole_model
        return whole.slack * SLACK, whole.context * SLACK

    @cached_property
    def min_state_bytes(self) -> float:
        """Bytes that every rank needs at least under any layout: an equal share of the states of
        the full model."""
        first = self._whole_model
        return SLACK * sum(first.states) / self.space.world * first.slack + first.context

    @cached_property
    def least_gpus(self) -> int | None:
        """The fewest GPUs on which the states of the full model can fit under any layout; None
        where not even an empty rank fits."""
        first = self._whole_model
        room = self.usable_memory - first.context
        return ceil(SLACK * sum(first.states) * first.slack / room) if room > 0 else None

    @cached_property
    def _whole_model(self) -> FirstStage:
        return self._first_stage(self.space.replicated)

    def _first_stage(self, layout: LayoutSettings) -> FirstStage:
        # as many micro batches as may be in flight are enough, and fewer are counted
        microbatches = min(self.space.microbatches(layout), 2 * layout.pp)
        known = self._memory(layout)
        memory = known.of_stage(0, microbatches)
        states = (memory.optimizer_bytes, memory.gradient_bytes, memory.parameter_bytes)
        slack = memory.reserved_bytes / memory.allocated_bytes
        other = memory.allocated_bytes - sum(states)
        experts = self._expert_shares(known.layout)
        if self.space.job.training.offload_optimizer:  # where ZeRO cuts them, gradients are on the host
            states = (states[0], 0, states[2])
        return FirstStage(states, experts, other, slack, memory.context_bytes)

    def _expert_shares(self, layout: JobLayout) -> tuple[float, float, float]:
        """The share of the first stage's optimizer, gradients and parameters that is of experts."""
        if EXPERTS not in layout.views:
            return 0.0, 0.0, 0.0
        held, trained = (
            local_parameters(layout, 0, view=EXPERTS, trained_only=only)
            / max(1, local_parameters(layout, 0, trained_only=only))
            for only in (False, True)
        )
        return trained, trained, held


def missing_link(evaluator: LayoutEvaluator) -> Link | None:
    """The network level without a bandwidth that prevents timing a layout that fits the memory:
    intra_node or inter_node; None where none fits, or each of them can be timed."""
    cluster, domain = evaluator.space.job.cluster, evaluator.space.domain.ranks
    sizes: dict[Link, int] = {"inter_node": -(-evaluator.space.world // domain), "intra_node": domain}
    level = next((name for name, n in sizes.items() if n > 1 and not getattr(cluster, name)), None)
    memory = evaluator.usable_memory
    if level is None or evaluator.min_state_bytes > memory:
        return None  # not even the states fit, however they are shared
    fitting = (one for one in evaluator.space.layouts() if evaluator.device_bytes(one) <= memory)
    return level if any(evaluator.step_seconds(one) is None for one in fitting) else None
