"""Messages of the replicas of a stage: gradients, parameters under ZeRO, and sums after them.

Replicas are those of a view: dp x cp for dense parameters. With N bytes of gradients and m micro
batches (arXiv 1910.02054, section 7): ZeRO 0 all-reduces N once a step; 1 reduce-scatters N and
gathers the parameters once; 2 scatters in each micro batch and gathers once; 3 scatters in each
micro batch and gathers the parameters of a layer for its forward and, where gradients pass, again
for its backward. After it, gradients of which each tensor-parallel rank has a part are summed over
its group, and those of parameters that several stages hold over these stages.

The runtime decides how gradients are grouped (`overlap.buckets` of its profile). Ours fills buckets
(model/layout/buckets.py), each padded to equal slices; from ZeRO 1 on, messages after the reduction cover
one slice. In others all gradients of a stage are one message or, where ZeRO sends in every micro
batch, those of a layer and those of the ends of a chunk; messages after the reduction are not
sliced. A runtime that keeps ZeRO 3's parameters over a step of a pipeline (`overlap.keeps`) sends
as under ZeRO 1.

Where `parallel.zero_size` cuts the replicas into groups that each share all states, these scatter
and gather, and once a step each slice is all-reduced over the ranks that hold it, one of a group.
MiCS (arXiv 2205.00119) and torch's hybrid sharding (arXiv 2304.11277, section 3.2.2) do so to keep
what is sent most often inside of a node.

By hand, 200 float32 parameters over 4 replicas in one bucket: ZeRO 0 all-reduces 800 bytes, ZeRO 1
reduce-scatters 1024 (256 elements) and gathers 1024. With zero_size 2 it pads to 256 as well, whose
slices have 128: two scatter 1024, pairs of equal slices all-reduce 512, two gather 1024.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mpctl.core.axes import zero_groups
from mpctl.core.collectives import Kind
from mpctl.core.sharding import View
from mpctl.model.layout.buckets import SLICE_ALIGNMENT, BucketShape, slice_numel
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.matmul import ParameterSpec
from mpctl.model.operators.table import StageSlice
from mpctl.plan.estimate.base_weights import gathered_numel
from mpctl.plan.estimate.communication import (
    Cover,
    Message,
    Phase,
    SharedParameter,
    gradient_bytes,
    local_parameters,
    shared_parameters,
)
from mpctl.plan.estimate.muon import MuonWork
from mpctl.spec.runtime import RuntimeProfile

# What may hide messages of the replicas: the pass of the layer itself, or once a step the last
# backward.
COVERS: dict[Phase, Cover] = {"forward": "layer", "backward": "layer", "step": "last_backward"}


class ReplicaGroup(NamedTuple):
    """Ranks that reduce their gradients together, and in how many bytes.

    zero: the ZeRO stage that messages follow. value, gradient: bytes of an element of parameters
    and of gradients. alignment: elements that a slice is a multiple of. name: of the group. copies:
    how often ZeRO's slices exist among the replicas (`View.copies`).
    """

    replicas: int
    zero: int
    value: int
    gradient: int
    alignment: int = 1
    name: str = "dp_cp"
    copies: int = 1

    @property
    def slices(self) -> int:
        """Ranks that divide a bucket."""
        return self.replicas // self.copies if self.zero else 1

    def padded(self, numel: int) -> int:
        """Elements of equal slices that hold `numel`."""
        if not self.zero:
            return numel
        return slice_numel(numel, self.slices, self.alignment) * self.slices

    def passes(self, numel: int, trained: int, *, goes_back: bool) -> Iterator[Message]:
        """Messages of one group of parameters in every micro batch: `numel` elements, of which
        `trained` have gradients. goes_back: whether backward needs the parameters."""
        if self.zero >= 2 and trained:
            yield self.reduced("reduce_scatter", trained, "backward")
        if self.zero == 3 and numel:
            yield self.gathered(numel, "forward")
            if goes_back:
                yield self.gathered(numel, "backward")

    def step(self, trained: int) -> Iterator[Message]:
        """Messages of one group of `trained` elements once a step: gradients, then parameters."""
        if not trained:
            return
        if self.zero < 2:
            kind: Kind = "reduce_scatter" if self.zero else "all_reduce"
            yield self.reduced(kind, trained, "step")
        if self.copies > 1:
            size = self.padded(trained) // self.slices * self.gradient
            equal = zero_groups(self.name)[1]
            cover: Cover = "last_layers" if self.zero >= 2 else COVERS["step"]
            yield Message(equal, "all_reduce", "gradients", size, 1, "step", cover)
        if self.zero in (1, 2):
            yield self.gathered(trained, "step")

    def reduced(self, kind: Kind, numel: int, phase: Phase) -> Message:
        """The reduction of `numel` elements of gradients."""
        size = self.padded(numel) * self.gradient
        return Message(self._shared, kind, "gradients", size, 1, phase, COVERS[phase])

    def gathered(self, numel: int, phase: Phase) -> Message:
        """The gathering of `numel` elements of parameters."""
        size = self.padded(numel) * self.value
        return Message(self._shared, "all_gather", "parameters", size, 1, phase, COVERS[phase])

    @property
    def _shared(self) -> str:
        return self.name if self.copies == 1 else zero_groups(self.name)[0]


def sent_zero_stage(zero: int, *, pp: int, profile: RuntimeProfile) -> int:
    """The ZeRO stage that messages follow, given the one in effect."""
    return min(zero, 1) if pp > 1 and profile.overlap.keeps else zero


@dataclass(frozen=True)
class GradientMessages:
    """Lists what the replicas of each stage send under one layout and runtime profile."""

    layout: JobLayout
    profile: RuntimeProfile

    @cached_property
    def groups(self) -> Mapping[str, ReplicaGroup]:
        """The replicas of this layout, by view."""
        return {name: self._group(view) for name, view in self.layout.views.items()}

    def _group(self, view: View) -> ReplicaGroup:
        pp, training = self.layout.job.parallel.pp, self.layout.job.training
        return ReplicaGroup(
            view.replicas,
            sent_zero_stage(view.zero, pp=pp, profile=self.profile),
            training.value_bytes,
            gradient_bytes(training, self.profile),
            SLICE_ALIGNMENT if self.profile.overlap.buckets else 1,
            view.replica_group,
            view.copies,
        )

    def chunk(self, stage: int, chunk: int) -> list[Message]:
        """Messages of one micro batch in one chunk of a stage."""
        if all(group.zero < 2 or group.replicas == 1 for group in self.groups.values()):
            return []
        if not self.profile.overlap.buckets:
            return list(self._by_layer(self.layout.chunk_slices(stage, chunk)))
        return [
            message.times(count)
            for shape, count in self.layout.bucket_shapes(stage).items()
            if chunk in shape.chunks
            for message in self._bucket_passes(shape)
        ]

    def step(self, stage: int) -> list[Message]:
        """Messages of a stage once a step, in the order in which they are sent."""
        if not self.profile.overlap.buckets:
            return [*self._by_stage(stage), *self.updates(stage)]
        messages: list[Message] = []
        for shape, count in self.layout.bucket_shapes(stage).items():
            alike = (shape.numel, shape.is_trained, shape.partial, shape.stages, shape.view)
            if alike not in self._steps:
                self._steps[alike] = list(self._bucket_step(shape))
            messages += [message.times(count) for message in self._steps[alike]]
        return messages + self.updates(stage)

    def updates(self, stage: int) -> list[Message]:
        """Messages of a stage that an update needs, between those of gradients and of parameters."""
        return list(MuonWork(self.layout).messages(stage))

    @cached_property
    def _steps(self) -> dict[Hashable, list[Message]]:
        """Messages of a bucket, cached by everything that determines them: chunks send equal
        buckets alike."""
        return {}

    def all(self, stage: int) -> Iterator[Message]:
        """All messages of a stage in one step, those of every micro batch as often."""
        m = self.layout.num_microbatches
        if not self.profile.overlap.buckets:
            for chunk in range(len(self.layout.stages[stage])):
                yield from (message.times(m) for message in self.chunk(stage, chunk))
            yield from self.step(stage)
            return
        for shape, count in self.layout.bucket_shapes(stage).items():
            passes = [message.times(m * len(shape.chunks)) for message in self._passes_of(shape)]
            own = [
                *(p for p in passes if p.what == "gradients"),
                *self._bucket_step(shape),
                *(p for p in passes if p.what != "gradients"),
            ]
            yield from (message.times(count) for message in own)
        yield from self.updates(stage)

    def forward(self, stage: int) -> list[Message]:
        """The gathers of one micro batch's forward on a stage, chunk by chunk."""
        if all(group.zero < 3 or group.replicas == 1 for group in self.groups.values()):
            return []
        if self.profile.overlap.buckets:
            return [
                self.groups[bucket.view.name].gathered(bucket.numel, "forward").times(len(bucket.chunks))
                for bucket in self.layout.buckets(stage)
                if self.groups[bucket.view.name].zero == 3
            ]
        chunks = range(len(self.layout.stages[stage]))
        messages = (message for chunk in chunks for message in self.chunk(stage, chunk))
        return [message for message in messages if message.phase == "forward"]

    def _passes_of(self, shape: BucketShape) -> list[Message]:
        return [] if self.groups[shape.view].replicas == 1 else self._bucket_passes(shape)

    def _bucket_passes(self, shape: BucketShape) -> list[Message]:
        trained = shape.numel if shape.is_trained else 0
        group = self.groups[shape.view]
        return list(group.passes(shape.numel, trained, goes_back=shape.goes_back))

    def _bucket_step(self, shape: BucketShape) -> Iterator[Message]:
        if not shape.is_trained:
            return
        group = self.groups[shape.view]
        messages = list(group.step(shape.numel)) if group.replicas > 1 else []
        size = group.padded(shape.numel) // group.slices * group.gradient
        yield from (message for message in messages if message.what == "gradients")
        yield from self._after_reduction(size, shape.partial, shape.stages)
        yield from (message for message in messages if message.what == "parameters")

    def _after_reduction(self, size: int, partial: str, stages: tuple[int, ...]) -> Iterator[Message]:
        if partial:
            yield Message(partial, "all_reduce", "partial gradients", size)
        if stages:
            yield Message("pp", "all_reduce", "shared parameters", size, stages=stages)

    def _by_layer(self, slices: Sequence[StageSlice]) -> Iterator[Message]:
        """Every layer by itself, and the ends of the chunk together, once each."""
        for part in slices:
            for layers, flow in part.blocks:
                if id(flow) not in self._layers:
                    own = self._passes(flow.part.weights, flow.trained, flow.after, is_layer=True)
                    self._layers[id(flow)] = list(own)
                for message in self._layers[id(flow)]:
                    yield message.times(layers)
        ends, trained_ends = (
            {w.name: w for part in slices for w in part.end_weights(trained_only=trained_only)}
            for trained_only in (False, True)
        )
        yield from self._passes(ends.values(), trained_ends.values(), True)

    @cached_property
    def _layers(self) -> dict[int, list[Message]]:
        """Messages of a layer in a micro batch, by the id of its kind."""
        return {}

    def _passes(
        self,
        weights: Collection[ParameterSpec],
        trained: Collection[ParameterSpec],
        back: bool,
        *,
        is_layer: bool = False,
    ) -> Iterator[Message]:
        """Messages of each view's replicas for these parameters in a micro batch."""
        for view, group in self.groups.items():
            of_trained = sum(w.local_numel(self.layout.views) for w in trained if w.view == view)
            numel = gathered_numel(self.layout, weights, view, trained if is_layer else None)
            yield from group.passes(numel, of_trained, goes_back=back)

    def _by_stage(self, stage: int) -> Iterator[Message]:
        layout = self.layout
        for view, group in self.groups.items():
            if group.replicas > 1:
                trained = local_parameters(layout, stage, trained_only=True, view=view)
                yield from group.step(trained)
        gradient = gradient_bytes(layout.job.training, self.profile)
        if layout.job.parallel.sequence_parallel:
            partial = local_parameters(layout, stage, trained_only=True, whole_only=True)
            if partial:
                yield from self._after_reduction(partial * gradient, "tp", ())
        for shared in self._shared:
            if stage in shared.stages:
                size = shared.weight.local_numel(layout.views) * gradient
                yield from self._after_reduction(size, "", shared.stages)

    @cached_property
    def _shared(self) -> list[SharedParameter]:
        return shared_parameters(self.layout)
