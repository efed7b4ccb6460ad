"""A floor under the seconds of a step, for many layouts at once.

Of the estimate (estimate/time.py) only what certainly comes is kept: kernels or their host,
whichever take longer; no message between stages; of what goes on beside others the part that
overlaps nothing. Stage k of a pipeline, whose stages take W_j = F_j + B_j for a micro batch, starts
when those before it have run one forward each, and they run one backward each when it is done:

    step >= m W_k + sum of W_j over j < k        with chunks, of the first chunk's W_j;
                                                 under zero-bubble, of F_j alone

and no stage's W_k is less than the mean. By hand, 2 stages, F = 1, B = 2, m = 3: 9 + 3 = 12, which
is the step itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import NamedTuple

from mpctl.estimate.gradient_messages import ReplicaGroup, sent_zero_stage
from mpctl.estimate.network import MissingLink
from mpctl.estimate.work import OpTimes
from mpctl.planning.layout_settings import LayoutSettings
from mpctl.search.evaluate import SLACK, LayoutEvaluator, group_of
from mpctl.search.space import AxesKey, LayerKey, LayoutFamily
from mpctl.spec.schedules import SCHEDULES


class PassBound(NamedTuple):
    """Seconds of one micro batch: kernels forward and backward, their host's."""

    forward: float
    backward: float
    host_forward: float
    host_backward: float

    @property
    def ahead(self) -> float:
        return max(self.forward, self.host_forward)

    @property
    def whole(self) -> float:
        return self.beside(0.0)

    def beside(self, host: float) -> float:
        """Forward and backward where the host takes so much more for each."""
        ahead = max(self.forward, self.host_forward + host)
        return ahead + max(self.backward, self.host_backward + host)


def passed(work: OpTimes, slow: float) -> PassBound:
    return PassBound(
        work.forward + work.tp_forward + work.cp_forward,
        work.inputs + work.weights + work.tp_backward + work.cp_backward,
        slow * work.host_forward, slow * work.host_backward,
    )  # fmt: skip


def summed(passes: Iterable[tuple[int, PassBound]]) -> PassBound:
    found = list(passes)
    return PassBound(*(sum(n * own[at] for n, own in found) for at in range(4)))


@dataclass(frozen=True, slots=True)
class CostBounds:
    """Costs of one micro batch that all layouts of a layer key share.

    whole: all layers and ends. layer, most: the fastest and the slowest layer. ends: all ends
    together. exit: what stands after the last layer. numel, trained: elements on a rank of the
    smallest layer, all of them and those with gradients. goes_back: whether every layer has a
    backward.
    """

    whole: PassBound
    layer: PassBound
    most: PassBound
    ends: PassBound
    exit: PassBound
    numel: int
    trained: int
    goes_back: bool


class StageCut(NamedTuple):
    """Layers before a stage, those of it, whether it is the last; of virtual stages the first
    chunk's count as before."""

    before: int
    own: int
    is_last: bool


class StepTimeBound:
    """Bounds over the layouts of an engine's space."""

    def __init__(self, engine: LayoutEvaluator) -> None:
        self.engine, self.space = engine, engine.space
        self.batch = self.space.job.training.global_batch_size or 1
        self.costs = cache(self._costs)

    def _costs(self, group: LayerKey) -> CostBounds | None:
        """None where a link that the group needs is not known."""
        layout = self._any(group)
        operators = self.engine.operators(layout, self.engine.job_layout(layout))
        table, slow = self.engine.table(group.tp), self.engine.speed.host
        layers: list[tuple[int, PassBound]] = []
        ends: list[tuple[int, PassBound]] = []
        sizes: list[tuple[int, int, bool]] = []
        try:
            for stack, flow in zip(table.stacks, table.flows, strict=True):
                for run, kind in flow.runs:
                    work = operators.block(stack, kind)
                    layers.append((len(run), passed(work, slow)))
                    weights = (kind.part.weights, kind.trained)
                    numel, trained = (sum(w.local_numel(group.tp) for w in ws) for ws in weights)
                    sizes.append((numel, trained, kind.after))
                ends += [(1, passed(operators.end(e), slow)) for e in (flow.entry, flow.exit)]
        except MissingLink:
            return None
        least, most = (
            PassBound(*(f(own[at] for _, own in layers) for at in range(4))) for f in (min, max)
        )
        return CostBounds(
            summed([*layers, *ends]), least, most, summed(ends), ends[-1][1],
            min(numel for numel, _, _ in sizes), min(trained for _, trained, _ in sizes),
            all(goes_back for *_, goes_back in sizes),
        )  # fmt: skip

    def _any(self, group: LayerKey) -> LayoutSettings:
        """A layout of the group; tp and cp lie side by side, which is where they are fastest."""
        dp = self.space.world // (group.tp * group.cp)
        order = self.space.fixed.get("order", "tp-cp-dp-pp")
        return LayoutSettings(
            group.tp, group.cp, dp, 1, 1, "1f1b", "even", group.micro_batch_size, group.recompute,
            group.sequence_parallel, 0, order,
        )  # fmt: skip

    def family_of(self, layout: LayoutSettings) -> LayoutFamily:
        m = max(1, self.batch // (layout.micro_batch_size * layout.dp))
        shape = AxesKey(group_of(layout), layout.dp, layout.pp, m)
        return LayoutFamily(shape, layout.vpp, layout.schedule, layout.stage_balance)

    def guess(self, shape: AxesKey) -> float:
        """No more than `shape`: as if nothing were computed again, so that groups are counted only
        where that alone is not too much."""
        return self.shape(shape._replace(group=shape.group._replace(recompute="none")))

    def shape(self, shape: AxesKey) -> float:
        """Of all its families: no stage is faster than the mean."""
        costs = self.costs(shape.group)
        if costs is None:
            return inf
        return shape.microbatches * costs.whole.whole / shape.pp * SLACK

    def family(self, family: LayoutFamily) -> float:
        """Of all its layouts: the pipeline."""
        shape, costs = family.shape, self.costs(family.shape.group)
        if costs is None:
            return inf
        m, chunks = shape.microbatches, family.vpp
        bound = m * costs.whole.beside(self._host(family) * shape.pp * chunks) / shape.pp
        if shape.pp == 1:
            return bound * SLACK
        layer, host = costs.layer, self._host(family) * chunks
        splits = SCHEDULES[family.schedule].splits_backward
        fill = layer.ahead if splits else layer.whole
        for before, own, is_last in self._cuts(family):
            held = [(own, layer), (int(is_last), costs.exit)]
            bound = max(bound, m * summed(held).beside(host) + before * fill)
        return bound * SLACK

    def _host(self, family: LayoutFamily) -> float:
        """Seconds that a pass over a chunk takes the host besides its layers."""
        host = self.engine.profile.host
        sends = host.message if family.shape.pp > 1 else 0.0
        return self.engine.speed.host * (host.micro_batch + sends)

    def _cuts(self, family: LayoutFamily) -> list[StageCut]:
        """Of the stages, those that may be the slowest: the last of each number of layers."""
        key = self.engine.cut_key(family.layout(0, ""))
        return self.engine.once(("cuts", *key), lambda: self._find_cuts(family))

    def _find_cuts(self, family: LayoutFamily) -> list[StageCut]:
        layout = family.layout(0, "")
        stages = self.engine.stages(self.space.job_of(layout), layout)
        found: dict[tuple[int, bool], StageCut] = {}
        before = 0
        for number, spans in enumerate(stages):
            own, is_last = sum(stop - start for start, stop in spans), number == len(stages) - 1
            found[own, is_last] = StageCut(before, own, is_last)
            before += spans[0][1] - spans[0][0]
        return list(found.values())

    def members(
        self, family: LayoutFamily, bound: float, zeros: Sequence[int] | None = None
    ) -> Iterator[tuple[float, LayoutSettings]]:
        """Its layouts, each with a bound of its own: what comes once a step, and ZeRO's messages,
        as far as nothing hides them."""
        costs = self.costs(family.shape.group)
        assert costs is not None, "a family without costs has no bound"
        least = most = self.space.layers
        if family.shape.pp > 1:
            least, most = (f(cut.own for cut in self._cuts(family)) for f in (min, max))
        host = self._host(family) * family.vpp
        backward = most * (costs.most.backward + costs.most.host_backward) + host
        backward += costs.ends.backward + costs.ends.host_backward
        for layout in self.space.members(family, zeros):
            more = self._optimizer(layout, least * costs.trained)
            if layout.dp * layout.cp > 1:
                own = _Once(least, most, family.shape.microbatches, backward)
                more += self._messages(layout, costs, own)
            yield bound + SLACK * more, layout

    def _optimizer(self, layout: LayoutSettings, trained: int) -> float:
        profile, speed = self.engine.profile, self.engine.speed
        parts = layout.dp * layout.cp if layout.zero else 1
        moved = trained * profile.operators.optimizer_bytes / parts
        return moved / speed.bandwidth + speed.host * profile.host.step

    def _messages(self, layout: LayoutSettings, costs: CostBounds, own: _Once) -> float:
        """Over dp, of a stage with few layers whose last backward hides what one of many can."""
        zero = sent_zero_stage(layout.zero, pp=layout.pp, profile=self.engine.profile)
        group = ReplicaGroup(layout.dp * layout.cp, zero, *self.engine.widths)
        try:
            return self._timed(layout, group, costs, own)
        except MissingLink:
            return inf

    def _timed(
        self, layout: LayoutSettings, group: ReplicaGroup, costs: CostBounds, own: _Once
    ) -> float:
        """No more than the price of the replicas' messages: several layers may share a bucket."""
        overlap, seconds = self.engine.profile.overlap, self.engine.network(layout).seconds
        least, backward, added = own.least, own.backward, 0.0
        if group.zero >= 2:
            each = 1 if overlap.buckets and group.zero == 2 else least
            numel, trained = (least // each * size for size in (costs.numel, costs.trained))
            passes = group.passes(numel, trained, goes_back=costs.goes_back)
            sent = each * sum(map(seconds, passes))
            added += own.microbatches * shown(sent, overlap.zero, overlap.drag)
            backward = inf  # it is longer by messages whose sizes may differ
        sent = sum(map(seconds, group.step(least * costs.trained)))
        return added + shown(sent, overlap.dp, overlap.drag, backward)


class _Once(NamedTuple):
    """Layers of a stage at least and at most, micro batches, seconds of one's backward at most."""

    least: int
    most: int
    microbatches: int
    backward: float


def shown(sent: float, overlap: float, drag: float, beside: float = inf) -> float:
    """What messages add to the step at least, where such a share of them may be hidden beside so
    many seconds."""
    return sent - min(overlap * sent, beside) * max(0.0, 1 - drag)
