"""Exact seconds and bytes of layouts, equal to those of `mpctl plan`, at a part of its cost.

A layer's seconds follow from its Group and from where tp and cp lie; a network from axis sizes and
their order; a cut of the layers from what the cut is asked by. Each is computed once and shared by
all layouts that have it. An Engine is made for one search and forgotten with it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import Any, TypeVar

from mpctl.estimate.communication import gradient_bytes, value_bytes
from mpctl.estimate.kernels import MissingFigure, Speed, device_speed
from mpctl.estimate.memory import (
    MemoryCache,
    StageMemory,
    first_stage_memory,
    layout_memory,
    peak_bytes,
)
from mpctl.estimate.network import MissingLink, Network
from mpctl.estimate.time import StepTime, StepTimeModel
from mpctl.estimate.work import OperatorTimer, OpTimes
from mpctl.families import get_table
from mpctl.layout.job_layout import JobLayout
from mpctl.operators.grad_flow import GradFlow
from mpctl.operators.matmul import LayerStack
from mpctl.operators.table import OperatorTable
from mpctl.pipeline.costs import job_costs
from mpctl.pipeline.stages import Span, job_stages
from mpctl.planning.layout_settings import LayoutSettings
from mpctl.search.space import LayerKey, SearchSpace
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import RuntimeProfile, get_profile
from mpctl.topology import Topology

Value = TypeVar("Value")
Stages = list[list[Span]]
SLACK = 1 - 1e-9  # the same sums in another order


@dataclass(frozen=True)
class _Remembering(OperatorTimer):
    """Operators whose layers and ends are computed once."""

    memo: dict[int, OpTimes] = field(default_factory=dict)

    def block(self, stack: LayerStack, flow: GradFlow) -> OpTimes:
        found = self.memo.get(id(flow))
        if found is None:
            found = self.memo[id(flow)] = super().block(stack, flow)
        return found

    def end(self, flow: GradFlow) -> OpTimes:
        found = self.memo.get(id(flow))
        if found is None:
            found = self.memo[id(flow)] = super().end(flow)
        return found


class LayoutEvaluator:
    """Tables, networks, cuts, layer costs and stage contents that the layouts of one space share.
    Raises MissingFigure where no time can be stated."""

    def __init__(self, space: SearchSpace) -> None:
        job = space.job
        assert job.model is not None, "a space is of a model"
        if job.cluster.device is None:
            raise MissingFigure("no cluster.device is named")
        self.space, self.model = space, job.model
        self.profile: RuntimeProfile = get_profile(job.training.runtime)
        self.speed: Speed = device_speed(job.cluster, job.training.dtype)
        self.known: dict[Hashable, Any] = {}
        self.contents: MemoryCache = {}

    def once(self, key: Hashable, make: Callable[[], Value]) -> Value:
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = make()
        return found

    def table(self, tp: int) -> OperatorTable:
        freeze = self.space.job.training.freeze
        return self.once(tp, lambda: get_table(self.model, tp=tp, freeze=freeze))

    def network(self, layout: LayoutSettings) -> Network:
        sizes = (layout.tp, layout.cp, layout.dp, layout.pp)
        return self.once((*sizes, layout.order), lambda: self._network(sizes, layout.order))

    def _network(self, sizes: tuple[int, ...], order: str) -> Network:
        named = dict(zip(("tp", "cp", "dp", "pp"), sizes, strict=True))
        cluster = self.space.job.cluster
        topology = Topology.of(named, order=order, gpus_per_node=cluster.gpus_per_node)
        return Network(cluster, topology)

    def job_layout(self, layout: LayoutSettings) -> JobLayout:
        """The space's job under this layout, with the table and the stages that others share."""
        job = self.space.job_of(layout)
        return self._laid_out(job, layout)

    def _laid_out(self, job: JobSpec, layout: LayoutSettings) -> JobLayout:
        stages = self.stages(job, layout)
        return JobLayout.assemble(job, self.model, self.table(layout.tp), stages)

    def operators(self, layout: LayoutSettings, laid_out: JobLayout) -> OperatorTimer:
        """What times the layers and ends of the layout; layouts of one group share the times."""
        order = layout.order if layout.cp > 1 else ""
        memo: dict[int, OpTimes] = self.once((group_of(layout), order, "works"), dict)
        return _Remembering(laid_out, self.speed, self.network(layout), self.profile, memo=memo)

    @cached_property
    def widths(self) -> tuple[int, int]:
        """Bytes of a parameter and of its gradient as messages have them."""
        training = self.space.job.training
        return value_bytes(training), gradient_bytes(training, self.profile)

    def cut_key(self, layout: LayoutSettings) -> tuple[Hashable, ...]:
        """What the cut of the layers follows from: by cost, from what a layer costs in units of
        another, which the batch does not change."""
        key = (layout.pp, layout.vpp, layout.stage_balance)
        if layout.stage_balance == "even":
            return key
        asked = (layout.tp, layout.cp, layout.sequence_parallel, layout.recompute == "full")
        return (*key, self.once(("costs", *asked), lambda: self._relative_costs(layout)))

    def _relative_costs(self, layout: LayoutSettings) -> tuple[int, ...]:
        costs = job_costs(self.space.job_of(layout._replace(micro_batch_size=1)))
        every = (costs.entry, *costs.layers, costs.exit)
        unit = gcd(*every) or 1
        return tuple(cost // unit for cost in every)

    def stages(self, job: JobSpec, layout: LayoutSettings) -> Stages:
        key = self.cut_key(layout)
        return self.once(("cut", *key), lambda: job_stages(job, self.model.all_layers))

    def clock(self, layout: LayoutSettings) -> StepTimeModel:
        laid_out = self.job_layout(layout)
        return StepTimeModel(laid_out, self.operators(layout, laid_out))

    def time(self, layout: LayoutSettings) -> StepTime | None:
        """None where a link that this layout needs is not known."""
        try:
            return self.clock(layout).step()
        except MissingLink:
            return None

    def memory(self, layout: LayoutSettings) -> list[StageMemory]:
        return layout_memory(self.job_layout(layout), self.contents)

    def least_bytes(self, layout: LayoutSettings, zero: int) -> float:
        """No more than any rank needs under this ZeRO stage: what the first stage does, of its
        shared states neither padding nor what is gathered of them."""
        whole = layout._replace(zero=0, order="")
        states, rest, slack, context = self.once((whole, "least"), lambda: self._first(whole))
        n = layout.dp * layout.cp
        kept = sum(size / n if zero > at else size for at, size in enumerate(states))
        return SLACK * (kept + rest) * slack + context

    @cached_property
    def least_share(self) -> float:
        """Bytes of the whole model's states that a rank has at least, shared over all of them."""
        layout = LayoutSettings(
            1, 1, self.space.world, 1, 1, "1f1b", "even", 1, "full", False, 0, "tp-cp-dp-pp"
        )
        states, _, slack, context = self._first(layout)
        return SLACK * sum(states) / self.space.world * slack + context

    def _first(self, layout: LayoutSettings) -> tuple[tuple[int, ...], int, float, int]:
        """Of the first stage: optimizer, gradients and parameters whole; what else is allocated;
        the allocator's slack as a factor; context."""
        job = self._shortened(self.space.job_of(layout))
        m = first_stage_memory(self._laid_out(job, layout))
        states = (m.optimizer_bytes, m.gradient_bytes, m.parameter_bytes)
        slack = m.reserved_bytes / m.allocated_bytes
        return states, m.allocated_bytes - sum(states), slack, m.context_bytes

    def _shortened(self, job: JobSpec) -> JobSpec:
        """With as many micro batches as a stage may have under way, so that few are counted."""
        enough = 2 * job.parallel.pp * job.training.micro_batch_size * job.sizes["dp"]
        batch = min(job.training.global_batch_size or enough, enough)
        training = job.training.model_copy(update={"global_batch_size": batch})
        return job.model_copy(update={"training": training})

    def reserved(self, layout: LayoutSettings) -> int:
        """Bytes on the fullest rank. Order has no part in it."""
        return self.once(layout._replace(order=""), lambda: peak_bytes(self.memory(layout)))


def unknown_link(engine: LayoutEvaluator) -> str | None:
    """The network level without a bandwidth because of which a layout that fits the memory cannot
    be timed: intra_node or inter_node; None where none fits, or each of them can be timed."""
    cluster = engine.space.job.cluster
    sizes = {"inter_node": cluster.nodes, "intra_node": cluster.gpus_per_node or 1}
    level = next((name for name, n in sizes.items() if n > 1 and not getattr(cluster, name)), None)
    if level is None or cluster.device is None:
        return None
    limit = cluster.device.memory_bytes
    if engine.least_share > limit:
        return None  # not even the states fit, however they are shared
    fitting = (one for one in engine.space.layouts() if engine.reserved(one) <= limit)
    return level if any(engine.time(one) is None for one in fitting) else None


def group_of(layout: LayoutSettings) -> LayerKey:
    return LayerKey(
        layout.tp, layout.cp, layout.micro_batch_size, layout.sequence_parallel, layout.recompute
    )
