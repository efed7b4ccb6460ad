"""Lower bounds of a step's seconds, for many layouts at once.

Of the estimate (estimate/time.py) only unavoidable seconds are counted: kernels or their host,
whichever take longer; no message between stages; the exposed part of messages that may overlap with
computation. Stage k of a pipeline, whose stages take W_j = F_j + B_j for a micro batch, starts when
those before it have run one forward each, and they run one backward each when it is done:

    step >= m W_k + sum of W_j over j < k        with chunks, of the first chunk's W_j;
                                                 under zero-bubble, of F_j alone

and no stage's W_k is less than the mean. By hand, 2 stages, F = 1, B = 2, m = 3: 9 + 3 = 12, which
is the step itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from operator import mul
from typing import Any, NamedTuple

from mpctl.axes import AXES, DEFAULT_ORDER, FILLING, chosen_ranks
from mpctl.estimate.gradient_messages import ReplicaGroup, sent_zero_stage
from mpctl.estimate.kernels import OpTimes, cover_backwards
from mpctl.estimate.network import MissingLink
from mpctl.operators.grad_flow import GradFlow
from mpctl.planning.layout_settings import LayoutSettings
from mpctl.search.evaluate import SLACK, LayoutEvaluator
from mpctl.sharding import DENSE, EXPERTS, Views
from mpctl.spec.schedules import SCHEDULES

OUTSIDE_LAYER = tuple(axis.name for axis in AXES if not axis.in_layer)


class PassBound(NamedTuple):
    """Least seconds of one micro batch: of its kernels and of the host that launches them."""

    forward: float
    backward: float
    host_forward: float
    host_backward: float

    @property
    def forward_seconds(self) -> float:
        """Seconds of a forward: of kernels or host, whichever take longer."""
        return max(self.forward, self.host_forward)

    @property
    def seconds(self) -> float:
        """Seconds of a forward and a backward."""
        return self.with_host(0.0)

    def with_host(self, seconds: float) -> float:
        """Forward and backward where the host takes so many seconds more for each."""
        ahead = max(self.forward, self.host_forward + seconds)
        return ahead + max(self.backward, self.host_backward + seconds)


def pass_bound(work: OpTimes, slow: float) -> PassBound:
    """The bound of a layer or an end; slow: host time relative to that of the runtime's profile."""
    return PassBound(
        work.forward + work.tp_forward + work.cp_forward + work.ep_forward,
        work.dgrad + work.wgrad + work.tp_backward + work.cp_backward + work.ep_backward,
        slow * work.host_forward, slow * work.host_backward,
    )  # fmt: skip


def total_of(passes: Sequence[tuple[int, PassBound]]) -> PassBound:
    """The sum of bounds, each times its number."""
    counts = [count for count, _ in passes]
    columns = zip(*(one for _, one in passes), strict=True)
    return PassBound(*[sum(map(mul, counts, column)) for column in columns])


class Elements(NamedTuple):
    """Elements of a layer on a rank, all of them and those with gradients."""

    numel: int
    trained: int


class CostBounds(NamedTuple):
    """Costs of one micro batch that all layouts of a layer key share.

    whole: all layers and ends. layer, most: the fastest and the slowest layer. ends: all ends
    together. exit: the end after the last layer. dense: the fewest elements of a layer without its
    experts; experts: the fewest of the experts of a layer that has some, and plain the number of
    those that have none. goes_back: whether every layer has a backward.
    """

    whole: PassBound
    layer: PassBound
    most: PassBound
    ends: PassBound
    exit: PassBound
    dense: Elements
    experts: Elements
    plain: int
    goes_back: bool


class StageLayers(NamedTuple):
    """Numbers of layers of a stage that may be the slowest.

    before: in the first chunks of the stages before it; layers: in all of its chunks.
    """

    before: int
    layers: int
    is_last: bool


class StepTimeBound:
    """Lower bounds of the seconds of a step, over the layouts of an evaluator's space."""

    def __init__(self, evaluator: LayoutEvaluator) -> None:
        self.evaluator, self.space = evaluator, evaluator.space
        self.known_costs: dict[tuple[Any, ...], CostBounds | None] = {}
        host, slow = evaluator.profile.host, evaluator.speed.host
        # host seconds of a pass over a chunk, without those of its layers: alone, and in a pipeline
        self.host = slow * (host.micro_batch + 0.0), slow * (host.micro_batch + host.message)
        self.host_step = slow * host.step

    def costs(self, layout: LayoutSettings) -> CostBounds | None:
        """Costs of the layouts with this one's layer key; None where a link that they need states
        no bandwidth."""
        key = layout.layer_key
        if key not in self.known_costs:
            self.known_costs[key] = self._costs(self._nearest_ranks(layout))
        return self.known_costs[key]

    def _costs(self, layout: LayoutSettings) -> CostBounds | None:
        job_layout = self.evaluator.job_layout(layout)
        operators, views = self.evaluator.timer(layout, job_layout), job_layout.views
        table, slow = self.evaluator.table(layout.tp), self.evaluator.speed.host
        layers: list[tuple[int, PassBound]] = []
        ends: list[tuple[int, PassBound]] = []
        dense: list[Elements] = []
        experts: list[Elements] = []
        goes_back, plain = True, 0
        try:
            for stack, flow in zip(table.stacks, table.flows, strict=True):
                for run, kind in flow.runs:
                    work = operators.block(stack, kind)
                    layers.append((len(run), pass_bound(work, slow)))
                    dense.append(_elements(kind, views, DENSE))
                    goes_back &= kind.after
                    if kind.part.has_experts:
                        experts.append(_elements(kind, views, EXPERTS))
                    else:
                        plain += len(run)
                ends += [(1, pass_bound(operators.end(e), slow)) for e in (flow.entry, flow.exit)]
            head = OpTimes()  # where the runtime fills stages, the loss may be on the next one
            head.add(operators.end(table.flows[-1].exit))
            if self.space.runs.fills_stages:
                head.add(operators.loss(table.flows[-1].exit), -1)
        except MissingLink:
            return None
        least, most = (
            PassBound(*(f(one[at] for _, one in layers) for at in range(4))) for f in (min, max)
        )
        return CostBounds(
            total_of([*layers, *ends]), least, most, total_of(ends), pass_bound(head, slow),
            _least(dense), _least(experts), plain, goes_back,
        )  # fmt: skip

    def _nearest_ranks(self, layout: LayoutSettings) -> LayoutSettings:
        """A layout of the same layer key whose tp and cp groups are neighbours, where they are
        fastest, unless the order is fixed: one stage, one chunk, the other ranks as replicas."""
        order = self.space.fixed.get("order", DEFAULT_ORDER)
        one = layout._replace(vpp=1, schedule="1f1b", stage_balance="even", zero=0, order=order)
        one = one.with_sizes(dict.fromkeys(OUTSIDE_LAYER, 1))
        return one.with_sizes({FILLING: self.space.world // chosen_ranks(one.sizes)})

    def of_axes_quickly(self, axes: LayoutSettings) -> float:
        """At most `of_axes`: the bound without recomputation, so that few layer keys are timed
        before something is ruled out."""
        return self.of_axes(axes._replace(recompute="none"))

    def of_axes(self, axes: LayoutSettings) -> float:
        """Least seconds of a step of all families over these axes: no stage is faster than the
        mean. Infinite where a link that they need states no bandwidth."""
        costs = self.costs(axes)
        if costs is None:
            return inf
        return self.space.microbatches(axes) * costs.whole.seconds / axes.pp * SLACK

    def of_family(self, family: LayoutSettings) -> float:
        """Least seconds of a step of all members: the pipeline of its slowest stage."""
        costs = self.costs(family)
        if costs is None:
            return inf
        m, chunks, host = self.space.microbatches(family), family.vpp, self.host[family.pp > 1]
        bound = m * costs.whole.with_host(host * family.pp * chunks) / family.pp
        if family.pp == 1:
            return bound * SLACK
        layer, exit_ = costs.layer, costs.exit
        splits = SCHEDULES[family.schedule].splits_backward
        fill = layer.forward_seconds if splits else layer.seconds
        for before, count, is_last in self._slow_stages(family):
            stage = PassBound(*[count * a + is_last * b for a, b in zip(layer, exit_, strict=True)])
            bound = max(bound, m * stage.with_host(host * chunks) + before * fill)
        return bound * SLACK

    def _slow_stages(self, family: LayoutSettings) -> list[StageLayers]:
        """The stages that may be the slowest: the last one of each number of layers."""
        key = ("slow stages", *self.evaluator.stages_key(family))
        return self.evaluator.cached(key, lambda: self._find_slow_stages(family))

    def _find_slow_stages(self, layout: LayoutSettings) -> list[StageLayers]:
        stages = self.evaluator.stages(self.space.job_of(layout), layout)
        last = self.evaluator.job_layout(layout).head_stage
        slow: dict[tuple[int, bool], StageLayers] = {}
        before = 0
        for number, spans in enumerate(stages):
            count, is_last = sum(stop - start for start, stop in spans), number == last
            slow[count, is_last] = StageLayers(before, count, is_last)
            before += spans[0][1] - spans[0][0]
        return list(slow.values())

    def of_members(
        self, family: LayoutSettings, bound: float, layouts: Iterable[LayoutSettings]
    ) -> Iterator[tuple[float, LayoutSettings]]:
        """Members of a family with `bound`, each with its own bound: higher by the work once a
        step, and by the exposed part of ZeRO's messages."""
        costs = self.costs(family)
        assert costs is not None, "a family without costs has no bound"
        least = most = self.space.layers
        if family.pp > 1:
            counts = [stage.layers for stage in self._slow_stages(family)]
            least, most = min(counts), max(counts)
        host = self.host[family.pp > 1] * family.vpp
        overlapped = most * (costs.most.backward + costs.most.host_backward) + host
        overlapped += costs.ends.backward + costs.ends.host_backward
        overlapped *= cover_backwards(family.pp, family.vpp)
        if self.evaluator.profile.overlap.gather is not None:
            overlapped += most * (costs.most.forward + costs.most.host_forward) + host
            overlapped += costs.ends.forward + costs.ends.host_forward
        overlap = _Overlap(least, self.space.microbatches(family), overlapped)
        for layout in layouts:
            added = self._optimizer(layout, costs, least)
            if layout.replicas > 1 or (costs.experts.numel and layout.edp > 1):
                added += self._messages(layout, costs, overlap)
            yield bound + SLACK * added, layout

    def _optimizer(self, layout: LayoutSettings, costs: CostBounds, layers: int) -> float:
        """Least seconds of an optimizer step of a stage of so many layers."""
        profile, speed = self.evaluator.profile, self.evaluator.speed
        parts = (layout.replicas, layout.edp) if layout.zero else (1, 1)
        with_experts = max(0, layers - costs.plain)
        stepped = layers * costs.dense.trained / parts[0]
        stepped += with_experts * costs.experts.trained / parts[1]
        return stepped * profile.operators.optimizer_bytes / speed.bandwidth + self.host_step

    def _messages(self, layout: LayoutSettings, costs: CostBounds, during: _Overlap) -> float:
        """Least seconds that messages between replicas add to the step: those of a stage with few
        layers, overlapped as far as the last backward of a stage with many can be. Several layers
        may share a bucket. Infinite where a link that they need states no bandwidth."""
        profile, computed, added = self.evaluator.profile, during.seconds, 0.0
        zero = sent_zero_stage(layout.zero, pp=layout.pp, profile=profile)
        overlap = profile.overlap
        try:
            if zero >= 2:
                sent = sum(
                    self._passes(layout, group, layers, size, goes_back=costs.goes_back)
                    for group, layers, size in self._groups(layout, zero, costs, during.least)
                )
                added += during.microbatches * exposed_seconds(sent, overlap.zero, overlap.drag)
                computed = inf  # it is longer by messages whose sizes may differ
            seconds = self.evaluator.network(layout).seconds
            sent = sum(
                seconds(message)
                for group, layers, size in self._groups(layout, zero, costs, during.least)
                for message in group.step(layers * size.trained)
            )
        except MissingLink:
            return inf
        share = max(overlap.dp, overlap.gather or 0.0)
        return added + exposed_seconds(sent, share, overlap.drag, computed)

    def _groups(
        self, layout: LayoutSettings, zero: int, costs: CostBounds, layers: int
    ) -> Iterator[tuple[ReplicaGroup, int, Elements]]:
        """The replicas of dense parameters and of experts, with how many layers of a stage have
        some and their elements."""
        widths = self.evaluator.message_widths
        if layout.replicas > 1:
            yield ReplicaGroup(layout.replicas, zero, *widths), layers, costs.dense
        with_experts = max(0, layers - costs.plain)
        if with_experts and layout.edp > 1:
            yield ReplicaGroup(layout.edp, zero, *widths, name="edp"), with_experts, costs.experts

    def _passes(
        self, layout: LayoutSettings, group: ReplicaGroup, layers: int, size: Elements, *,
        goes_back: bool,
    ) -> float:  # fmt: skip
        """Least seconds of ZeRO's messages of a group in one micro batch of a stage."""
        seconds = self.evaluator.network(layout).seconds
        each = 1 if self.evaluator.profile.overlap.buckets and group.zero == 2 else layers
        numel, trained = (layers // each * n for n in size)
        return each * sum(map(seconds, group.passes(numel, trained, goes_back=goes_back)))


def _elements(layer: GradFlow, views: Views, view: str) -> Elements:
    """The elements of a layer on a rank that belong to a view."""
    both = (layer.part.weights, layer.trained)
    return Elements(*[sum(w.local_numel(views) for w in ws if w.view == view) for ws in both])


def _least(layers: Sequence[Elements]) -> Elements:
    """The fewest elements of a layer; none of no layers."""
    return Elements(*map(min, zip(*layers, strict=True))) if layers else Elements(0, 0)


class _Overlap(NamedTuple):
    """The computation that messages between replicas can overlap with.

    least: layers of the stage that has fewest. microbatches: of a step. seconds: the longest work
    of a stage that messages sent once a step may run during: of the last backward and, where
    parameters are gathered during it, of a forward.
    """

    least: int
    microbatches: int
    seconds: float


def exposed_seconds(sent: float, overlap: float, drag: float, computed: float = inf) -> float:
    """Seconds that messages of `sent` seconds add to the step at least, where the share `overlap`
    of them may run during `computed` seconds of work, which they slow down by `drag`."""
    return sent - min(overlap * sent, computed) * max(0.0, 1 - drag)
