"""Every message that a rank takes part in during one training step: the one list of them.

Bytes are sums over this list and seconds are its prices over the network's routes (time.py,
operator_times.py, plan/search/bound.py), so that nothing is counted without being timed, or timed
without being counted. Layers and ends send over tp and cp in every micro batch (layer_messages.py),
stages send to each other (messages.py), replicas reduce gradients and gather parameters
(gradient_messages.py). Once a step the square of the gradient's norm is summed over tp and pp, from
ZeRO 1 on also over the replicas (for views other than the dense one over their groups), and all
ranks exchange a status: loss, stop, and the memory of each; under fp8 with delayed scaling also the
largest elements of the cast tensors.

By hand, GPT of 2 layers on tp 2, one micro batch: 2 x 4 all-reduces in the layers, one of the
embedding's result, one of the head's gradient, three of the loss, the norm and the status.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from mpctl.core.sharding import validation_sizes
from mpctl.model.layout.job_layout import AMAX_BYTES, NORM_FIELDS, ROUTING_FIELDS, STATUS_FIELDS, JobLayout
from mpctl.model.operators.grad_flow import GradFlow
from mpctl.model.operators.table import StageSlice
from mpctl.plan.estimate.communication import Message as Message
from mpctl.plan.estimate.communication import MessageCount, P2PTransfer, count_messages, stage_transfers, transfers
from mpctl.plan.estimate.expert_messages import LOADS
from mpctl.plan.estimate.gradient_messages import GradientMessages
from mpctl.plan.estimate.layer_messages import LayerMessages, forward_flow
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import RuntimeProfile

COUNT_BYTES = 8  # int64
STATUS_BYTES = 8  # float64: the gradient norm's square, and each entry of a status


@dataclass(frozen=True)
class StepMessages:
    """The messages of one step of a layout under a runtime profile."""

    layout: JobLayout
    profile: RuntimeProfile

    @classmethod
    def of(cls, layout: JobLayout) -> StepMessages:
        """The messages under the runtime that the job names."""
        return cls(layout, layout.profile)

    @cached_property
    def layers(self) -> LayerMessages:
        """The messages of layers and ends over tp and cp."""
        return LayerMessages(self.layout, self.profile)

    @cached_property
    def gradients(self) -> GradientMessages:
        """The messages of the replicas of each stage."""
        return GradientMessages(self.layout, self.profile)

    @cached_property
    def transfers(self) -> list[P2PTransfer]:
        """What neighbouring chunks send each other for one micro batch."""
        return list(transfers(self.layout, scatters=self.profile.overlap.scatters))

    def once_a_step(self, stage: int) -> list[Message]:
        """Messages of a stage once a step: gradients and parameters, the norm, the status."""
        return self._once[stage]

    @cached_property
    def _once(self) -> list[list[Message]]:
        return self.layout.of_stages(lambda stage: [*self.gradients.step(stage), *self.closing])

    @cached_property
    def closing(self) -> list[Message]:
        """Messages of every stage at the end of a step, in groups of more than one rank."""
        norms = (Message(axis, "all_reduce", "gradient norm", STATUS_BYTES) for axis in self._norm_axes())
        once = (*fp8_message(self.layout), *routing_message(self.layout), status_message(self.layout.job, trains=True))
        return list(self.sent(chain(norms, once)))

    def _norm_axes(self) -> Iterator[str]:
        """The groups over which squares of gradients are summed: the shards of each view, under
        ZeRO its replicas too, and the stages."""
        for name, view in self.layout.views.items():
            if self.gradients.groups[name].zero:
                yield view.zero_group
            yield view.shard_group
        yield "pp"

    def sent(self, messages: Iterable[Message]) -> Iterator[Message]:
        """Leaves out messages of groups of one rank, which sends nothing."""
        sizes = self.layout.group_sizes
        return (message for message in messages if sizes[message.axis] > 1)

    def counted(self) -> list[tuple[MessageCount, ...]]:
        """All messages of one rank of each stage in a step, equal ones of a kind together."""
        m = self.layout.num_microbatches
        between = stage_transfers(self.layout, scatters=self.profile.overlap.scatters)
        return [
            tuple(
                chain(
                    self._passes(stage),
                    count_messages(message.times(m) for message in between[stage]),
                    count_messages(self.gradients.all(stage)),
                    count_messages(self.closing),
                )
            )
            for stage in range(len(self.layout.stages))
        ]

    def _passes(self, stage: int) -> Iterator[MessageCount]:
        m = self.layout.num_microbatches
        for part in self.layout.stage_slices(stage):
            for messages, count in self.slice_messages(part):
                yield from count_messages(message.times(m * count) for message in messages)

    def slice_messages(self, part: StageSlice, *, forward_only: bool = False) -> Iterator[tuple[list[Message], int]]:
        """Messages over tp and cp of one micro batch and the number of layers that send them: for
        every kind of layer, then for the ends. forward_only: those of a validation."""
        for layers, flow in part.blocks:
            sent = self.layers.block(part.stack, _chosen(flow, forward_only))
            if forward_only:  # which has no auxiliary loss
                sent = [message for message in sent if message.what != LOADS]
            yield sent, layers
        for end in part.ends:
            yield self.layers.end(_chosen(end, forward_only)), 1

    def forward_of(self, stage: int, count: int) -> Iterator[MessageCount]:
        """Messages of the forwards of `count` micro batches on a stage, without parameters."""
        for part in self.layout.stage_slices(stage):
            for messages, layers in self.slice_messages(part, forward_only=True):
                yield from count_messages(message.times(layers * count) for message in messages)
        for transfer in self.transfers:
            if transfer.is_forward and transfer.sender.stage == stage:
                for message in transfer.messages:
                    if message.kind == "send":
                        yield from count_messages([message.times(count)])


def _chosen(flow: GradFlow, forward_only: bool) -> GradFlow:
    return forward_flow(flow) if forward_only else flow


def step_messages(layout: JobLayout) -> list[tuple[MessageCount, ...]]:
    """Messages of one rank of each stage in one step; a group of one rank sends nothing."""
    return StepMessages.of(layout).counted()


def fp8_message(layout: JobLayout) -> Iterator[Message]:
    """The exchange of the largest elements of fp8 operands between all ranks once a step, where
    the runtime does so under delayed scaling."""
    training, exchanges = layout.job.training, layout.profile.operators.exchanges_amax
    if exchanges and training.dtype == "fp8" and training.fp8_recipe == "delayed":
        size = len(layout.table.narrowed_layers) * AMAX_BYTES
        yield Message("world", "all_reduce", "fp8 scales", size)


def routing_message(layout: JobLayout) -> Iterator[Message]:
    """The sum of the tokens of each expert over all ranks once a step, where the runtime takes it
    of a model with experts."""
    if not layout.model.experts or not layout.profile.experts.sums_tokens:
        return
    numbers = len(layout.table.routed_layers) * layout.model.experts
    if numbers:
        yield Message("world", "all_reduce", "tokens of experts", numbers * COUNT_BYTES)


def status_message(job: JobSpec, *, trains: bool = False) -> Message:
    """The status that all ranks exchange once a step, or once a validated corpus."""
    fields = STATUS_FIELDS + NORM_FIELDS * trains
    if trains and job.model is not None and job.model.experts is not None:
        fields += ROUTING_FIELDS
    size = (fields + job.world_size) * STATUS_BYTES
    return Message("world", "all_reduce", "status", size)


# ------------------------------------------------------------------------------
# Every message that a rank takes part in during one validation, in bytes of full messages.
#
# A validation is forward passes only: the messages of a step's forward (messages.py), one gathering
# of each bucket of parameters at ZeRO 3, and one status a corpus. Which samples a replica computes,
# and in how many micro batches, is `sharding.validation_batches`; a micro batch that only fills up
# the count is one sample, filled up where tensor-parallel ranks cut the samples.
#
# By hand, 5 samples, dp 2, micro batches of 2: replica 0 computes 2 and 1 samples, replica 1
# computes 2 and one that does not count; at ZeRO 3 both gather each bucket twice.


def validation_messages(
    layout: JobLayout, *, stage: int, replica: int, samples: Sequence[int]
) -> tuple[MessageCount, ...]:
    """The messages of one validation, of one rank of pipeline stage `stage`.

    replica: its data-parallel replica. samples: number of validation samples of each corpus.
    """
    sizes = Counter[int]()
    for corpus in samples:
        sizes.update(_batch_sizes(layout, replica, corpus))
    forwards = (
        StepMessages.of(layout.with_micro_batch_size(size)).forward_of(stage, count)
        for size, count in sorted(sizes.items())
    )
    messages = StepMessages.of(layout)
    gathers = (m.times(sizes.total()) for m in messages.gradients.forward(stage))
    status = messages.sent([status_message(layout.job).times(len(samples))])
    alone = (count_messages([message]) for message in chain(gathers, status))
    return tuple(chain(*forwards, *alone))


def _batch_sizes(layout: JobLayout, replica: int, samples: int) -> dict[int, int]:
    job = layout.job
    return validation_sizes(
        samples,
        micro_batch=job.training.micro_batch_size,
        parts=job.sizes["dp"],
        index=replica,
        sample_parts=layout.grid.sample_parts,
    )
