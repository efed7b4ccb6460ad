"""Lower bounds of a step's seconds, for many layouts at once.

Of the estimate (plan/estimate/time.py) only unavoidable seconds are counted: kernels or their host,
whichever take longer; no message between stages; the exposed part of messages that may overlap with
computation. Stage k of a pipeline, whose stages take W_j = F_j + B_j for a micro batch, starts when
those before it have run one forward each, and they run one backward each when it is done:

    step >= m W_k + sum of W_j over j < k        with chunks, of the first chunk's W_j;
                                                 under zero-bubble, of F_j alone

and no stage's W_k is less than the mean. Then come the exposed messages and the update: those of
stage k, which does not wait for the backward passes of the stages before it, or the least of any
stage. W_k is that of its layers, kind by kind: a layer with experts takes longer than a dense one.
By hand, 2 stages, F = 1, B = 2, m = 3: 9 + 3 = 12, which is the step itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import gcd, inf
from operator import add, itemgetter
from typing import Any, NamedTuple

from mpctl.core.axes import AXES, DEFAULT_ORDER, FILLING, chosen_ranks
from mpctl.core.sharding import DENSE, EXPERTS
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.grad_flow import GradFlow
from mpctl.plan.estimate.base_weights import gathered_numel
from mpctl.plan.estimate.expert_overlap import least
from mpctl.plan.estimate.gradient_messages import ReplicaGroup, sent_zero_stage
from mpctl.plan.estimate.kernels import OpTimes, cover_backwards
from mpctl.plan.estimate.network import MissingLink
from mpctl.plan.estimate.optimizers import update_factor
from mpctl.plan.planning.layout_settings import LayoutSettings
from mpctl.plan.search.evaluate import SLACK, LayoutEvaluator
from mpctl.spec.schedules import SCHEDULES

_OF_MESSAGES = itemgetter(
    *range(len(AXES)),
    *map(
        LayoutSettings._fields.index,
        ("ep", "etp", "order", "tensor_mode", "tensor_depth", "sequence_parallel", "zero", "zero_size"),
    ),
)
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

    def times(self, count: int) -> PassBound:
        """The bound of `count` such layers."""
        forward, backward, host_forward, host_backward = self
        return PassBound(count * forward, count * backward, count * host_forward, count * host_backward)

    def with_host(self, seconds: float) -> float:
        """Forward and backward where the host takes so many seconds more for each."""
        ahead = max(self.forward, self.host_forward + seconds)
        return ahead + max(self.backward, self.host_backward + seconds)


def pass_bound(work: OpTimes, slow: float) -> PassBound:
    """The bound of a layer or an end; slow: host time relative to that of the runtime's profile."""
    return PassBound(
        work.forward + work.tp_forward + work.cp_forward + work.ep_forward,
        work.dgrad + work.wgrad + work.tp_backward + work.cp_backward + work.ep_backward,
        slow * work.host_forward,
        slow * work.host_backward,
    )


def total_of(passes: Sequence[tuple[int, PassBound]]) -> PassBound:
    """The sum of bounds, each times its number."""
    forward = backward = host_forward = host_backward = 0.0
    for count, one in passes:
        forward += count * one.forward
        backward += count * one.backward
        host_forward += count * one.host_forward
        host_backward += count * one.host_backward
    return PassBound(forward, backward, host_forward, host_backward)


class Elements(NamedTuple):
    """Elements of a layer on a rank: as many as ZeRO 3 gathers, and those with gradients."""

    numel: int
    trained: int


class LayerKind(NamedTuple):
    """Cost of layers of one kind: work per micro batch, and elements on a rank by view."""

    work: PassBound
    elements: dict[str, Elements]
    goes_back: bool


class CostBounds(NamedTuple):
    """Costs of one micro batch that all layouts of a layer key share.

    whole: all layers and ends. kinds: the kinds of layers, in the order in which they are met;
    most: the slowest. ends: all ends together. exit: the end after the last layer.
    """

    whole: PassBound
    kinds: tuple[LayerKind, ...]
    most: PassBound
    ends: PassBound
    exit: PassBound


class StageLayers(NamedTuple):
    """Numbers of layers of a stage that may be the slowest, by kind.

    before: in the first chunks of the stages before it; layers: in all of its chunks.
    """

    before: tuple[int, ...]
    layers: tuple[int, ...]
    is_last: bool


class SentBound(NamedTuple):
    """Least seconds of a stage's messages between replicas: of ZeRO's in one micro batch, and what
    those of once a step add to it, with its update."""

    passes: float
    after: float


class StepTimeBound:
    """Lower bounds of the seconds of a step, over the layouts of an evaluator's space."""

    def __init__(self, evaluator: LayoutEvaluator) -> None:
        self.evaluator, self.space = evaluator, evaluator.space
        self.known_costs: dict[tuple[Any, ...], CostBounds | None] = {}
        self.known_messages: dict[tuple[Any, ...], dict[tuple[int, ...], tuple[float, float, float]]] = {}
        host, slow = evaluator.profile.host, evaluator.speed.host
        # host seconds of a pass over a chunk, without those of its layers: alone, and in a pipeline
        self.host = slow * (host.micro_batch + 0.0), slow * (host.micro_batch + host.message)
        on_accelerator = evaluator.space.job.device_kind != "cpu"
        self.host_step = slow * host.step_on(on_accelerator)
        training = evaluator.space.job.training
        factor = 0.0 if training.offload_optimizer else update_factor(training, evaluator.profile.memory)
        self.optimizer_bytes = evaluator.profile.operators.on(on_accelerator).optimizer_bytes * factor

    def costs(self, layout: LayoutSettings) -> CostBounds | None:
        """Costs of the layouts with this one's layer key; None where a link that they need states
        no bandwidth."""
        key = (*layout.layer_key, layout.moe_overlap)
        if key not in self.known_costs:
            self.known_costs[key] = self._costs(self._nearest_ranks(layout))
        return self.known_costs[key]

    def _costs(self, layout: LayoutSettings) -> CostBounds | None:
        job_layout = self.evaluator.job_layout(layout)
        operators = self.evaluator.timer(layout, job_layout)
        table, slow = self.evaluator.table(layout.tp), self.evaluator.speed.host
        layers: list[tuple[int, PassBound]] = []
        ends: list[tuple[int, PassBound]] = []
        kinds: dict[int, LayerKind] = {}
        try:
            for stack, flow in zip(table.stacks, table.flows, strict=True):
                for run, kind in flow.runs:
                    if id(kind) not in kinds:
                        block = operators.block(stack, kind)
                        if share := operators.overlapped:
                            block = least(block, share, operators.waits(kind) * operators.factor)
                        work = pass_bound(block, slow)
                        held = self._held(layout, kind, job_layout)
                        kinds[id(kind)] = LayerKind(work, held, kind.after)
                    layers.append((len(run), kinds[id(kind)].work))
                ends += [(1, pass_bound(operators.end(e), slow)) for e in (flow.entry, flow.exit)]
            head = OpTimes()  # where the runtime fills stages, the loss may be on the next one
            head.add(operators.end(table.flows[-1].exit))
            if self.space.runs.fills_stages:
                head.add(operators.loss(table.flows[-1].exit), -1)
        except MissingLink:
            return None
        most = PassBound(*(max(one[at] for _, one in layers) for at in range(4)))
        whole, exit_ = total_of([*layers, *ends]), pass_bound(head, slow)
        return CostBounds(whole, tuple(kinds.values()), most, total_of(ends), exit_)

    def prediction_seconds(self, layout: LayoutSettings) -> float:
        """Seconds of a micro batch in the layers of multi-token prediction, without their heads and losses. Raises
        MissingLink where a link that they need states no bandwidth."""
        one = self._nearest_ranks(layout)
        flow = self.evaluator.table(layout.tp, apart=True).flows[-1].entry
        work = self.evaluator.timer(one, self.evaluator.job_layout(one)).end(flow)
        return pass_bound(work, self.evaluator.speed.host).seconds

    def _held(self, layout: LayoutSettings, kind: GradFlow, found: JobLayout) -> dict[str, Elements]:
        """The elements of a layer on a rank, by view. found: the layout that is bounded."""
        key = ("elements", id(kind), layout.tensor_mode, layout.tensor_depth, layout.ep, layout.etp)
        return self.evaluator.cached(key, lambda: {view: _elements(kind, found, view) for view in found.views})

    def _nearest_ranks(self, layout: LayoutSettings) -> LayoutSettings:
        """A layout of the same layer key whose tp and cp groups are neighbours, where they are
        fastest, unless the order is fixed: one stage, one chunk, the other ranks as replicas."""
        order = self.space.fixed.get("order", DEFAULT_ORDER)
        one = layout._replace(vpp=1, schedule="1f1b", stage_balance="even", pipeline_layout=None, zero=0, order=order)
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
        for stage in self._slow_stages(family):
            work = self._stage_work(costs, stage).with_host(host * chunks)
            bound = max(bound, m * work + self._fill(costs, family, stage))
        return bound * SLACK

    @staticmethod
    def _stage_work(costs: CostBounds, stage: StageLayers) -> PassBound:
        """Least seconds of a micro batch on a stage."""
        if len(costs.kinds) == 1:  # of most models, and so of every layout
            own = costs.kinds[0].work.times(stage.layers[0])
            return PassBound(*map(add, own, costs.exit)) if stage.is_last else own
        works = zip(stage.layers, [kind.work for kind in costs.kinds], strict=True)
        return total_of([*works, (int(stage.is_last), costs.exit)])

    @staticmethod
    def _before(costs: CostBounds, stage: StageLayers) -> PassBound:
        """A micro batch on the stages before one, kernels and host each in sum: which of them takes
        longer may differ between kinds of layers."""
        if len(costs.kinds) == 1:
            return costs.kinds[0].work.times(stage.before[0])
        works = [kind.work for kind in costs.kinds]
        return total_of([*zip(stage.before, works, strict=True)])

    def _fill(self, costs: CostBounds, family: LayoutSettings, stage: StageLayers) -> float:
        """Least seconds in which the stages before one fill and empty the pipeline."""
        before = self._before(costs, stage)
        splits = SCHEDULES[family.schedule].splits_backward
        return before.forward_seconds if splits else before.seconds

    def _slow_stages(self, family: LayoutSettings) -> list[StageLayers]:
        """The stages that may be the slowest: the last one of each number of layers of each
        kind."""
        key = ("slow stages", *self.evaluator.stages_key(family))
        return self.evaluator.cached(key, lambda: self._find_slow_stages(family))

    def _find_slow_stages(self, layout: LayoutSettings) -> list[StageLayers]:
        found = self.evaluator.job_layout(layout)
        kinds = max(found.table.layer_kinds) + 1  # as many as CostBounds.kinds, in their order
        slow: dict[tuple[tuple[int, ...], bool], StageLayers] = {}
        before = [0] * kinds
        for number, alike in enumerate(found.stage_classes):
            own, first = [0] * kinds, [0] * kinds
            for chunk, held in enumerate(alike.chunks):
                for kind, count in held.layers:
                    own[kind] += count
                    first[kind] += count * (chunk == 0)
            key = tuple(own), number == found.head_stage and found.prediction_place is None
            slow[key] = StageLayers(tuple(before), *key)
            before = [a + b for a, b in zip(before, first, strict=True)]
        return list(slow.values())

    def of_members(
        self, family: LayoutSettings, bound: float, layouts: Iterable[LayoutSettings]
    ) -> Iterator[tuple[float, LayoutSettings]]:
        """Members of a family with `bound`, each with its own bound: higher by the work once a
        step, and by the exposed part of ZeRO's messages."""
        costs = self.costs(family)
        assert costs is not None, "a family without costs has no bound"
        stages, most = self._slow_stages(family), self.space.layers
        if family.pp > 1:
            most = max(sum(stage.layers) for stage in stages)
        host = self.host[family.pp > 1] * family.vpp
        overlapped = most * (costs.most.backward + costs.most.host_backward) + host
        overlapped += costs.ends.backward + costs.ends.host_backward
        overlapped *= cover_backwards(family.pp, family.vpp)
        if self.evaluator.profile.overlap.gather is not None:
            overlapped += most * (costs.most.forward + costs.most.host_forward) + host
            overlapped += costs.ends.forward + costs.ends.host_forward
        m, host = self.space.microbatches(family), self.host[family.pp > 1] * family.vpp
        works = [
            (costs.whole if family.pp == 1 else self._stage_work(costs, stage)).with_host(host) for stage in stages
        ]
        starts = [self._before(costs, stage).forward_seconds for stage in stages]
        around = [self._fill(costs, family, stage) for stage in stages]
        held = list(dict.fromkeys(stage.layers for stage in stages))
        numbers = [held.index(stage.layers) for stage in stages]
        for layout in layouts:
            try:
                different = self._sent(layout, costs, held, overlapped)
                sent = [different[number] for number in numbers]
            except MissingLink:
                yield inf, layout
                continue
            # A stage closes its step when it is done; those before it, which close theirs too,
            # are later by their backward passes.
            first = min([one.after for one in different])
            ends = [
                m * (work + self._exposed(one.passes, work)) + max(start + one.after, fill + first)
                for start, fill, work, one in zip(starts, around, works, sent, strict=True)
            ]
            least = min([m * self._exposed(one.passes) + one.after for one in different])
            yield max(bound + SLACK * least, SLACK * max(ends)), layout

    def _exposed(self, sent: float, computed: float = inf) -> float:
        """Least seconds that ZeRO's messages of a micro batch add to `computed` seconds of it or
        more."""
        overlap = self.evaluator.profile.overlap
        return exposed_seconds(sent, overlap.zero, overlap.drag, computed) if sent else 0.0

    def _sent(
        self, layout: LayoutSettings, costs: CostBounds, held: Sequence[tuple[int, ...]], overlapped: float
    ) -> list[SentBound]:
        """The messages of the replicas of stages with these layers, and their updates: overlapped as far as
        `overlapped` seconds of the longest backward allow. Several layers may share a bucket. Raises
        MissingLink where a link that they need states no bandwidth."""
        profile, speed = self.evaluator.profile, self.evaluator.speed
        overlap, zero = profile.overlap, sent_zero_stage(layout.zero, pp=layout.pp, profile=profile)
        key = _OF_MESSAGES(layout)
        known = self.known_messages.get(key)
        if known is None:
            known = self.known_messages[key] = {}
        if zero >= 2:
            overlapped = inf  # it is longer by messages whose sizes may differ
        share = max(overlap.dp, overlap.gather or 0.0, overlap.zero * (layout.copies > 1))
        sent = list[SentBound]()
        for layers in held:
            if layers not in known:
                known[layers] = self._messages(layout, costs, layers, zero)
            passes, once, stepped = known[layers]
            after = stepped * self.optimizer_bytes / speed.bandwidth + self.host_step
            sent.append(SentBound(passes, after + exposed_seconds(once, share, overlap.drag, overlapped)))
        return sent

    def _messages(
        self, layout: LayoutSettings, costs: CostBounds, layers: tuple[int, ...], zero: int
    ) -> tuple[float, float, float]:
        """(seconds of ZeRO's messages in a micro batch, of those once a step, elements that the update of a
        rank changes). They depend on the placement of ranks, ZeRO, and the numbers of layers of the stage."""
        seconds, overlap = self.evaluator.network(layout).seconds, self.evaluator.profile.overlap
        passes = once = stepped = 0.0
        for view, group in self._groups(layout, zero):
            sends, trained = zero >= 2 and group.replicas > 1, 0
            in_buckets = zero == 2 and overlap.buckets
            for count, kind in zip(layers, costs.kinds, strict=True):
                if count and (size := kind.elements[view]).numel:
                    trained += count * size.trained
                    if sends and not in_buckets:
                        messages = group.passes(*size, goes_back=kind.goes_back)
                        passes += count * sum(map(seconds, messages))
            stepped += trained / group.slices
            if group.replicas == 1:
                continue
            if in_buckets:
                passes += sum(map(seconds, group.passes(0, trained, goes_back=True)))
            once += sum(map(seconds, group.step(trained)))
        return passes, once, stepped

    def _groups(self, layout: LayoutSettings, zero: int) -> Iterator[tuple[str, ReplicaGroup]]:
        """The replicas of each view, by its name."""
        copies = {DENSE: layout.copies, EXPERTS: gcd(layout.copies, layout.edp)}
        held = {DENSE: (layout.replicas, "dp_cp")}
        if self.space.model.experts is not None:
            held[EXPERTS] = layout.edp, "edp"
        for view, (ranks, name) in held.items():
            stage, times = (zero, copies[view]) if ranks > copies[view] else (0, 1)
            value, gradient = self.evaluator.message_widths
            yield view, ReplicaGroup(ranks, stage, value, gradient, name=name, copies=times)


def _elements(layer: GradFlow, layout: JobLayout, view: str) -> Elements:
    """The elements of a layer on a rank that belong to a view."""
    trained = sum(w.local_numel(layout.views) for w in layer.trained if w.view == view)
    return Elements(gathered_numel(layout, layer.part.weights, view, layer.trained), trained)


def exposed_seconds(sent: float, overlap: float, drag: float, computed: float = inf) -> float:
    """Seconds that messages of `sent` seconds add to the step at least, where the share `overlap`
    of them may run during `computed` seconds of work, which they slow down by `drag`."""
    return sent - min(overlap * sent, computed) * max(0.0, 1 - drag)
