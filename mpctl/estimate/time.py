"""A floor under the step time: every matrix product at its device's rate, nothing overlapped.

What a stage does for a micro batch is its products (flops.py) and its messages over tp and cp
(network.py), forward and backward by chunk: embedding and head where they are. Those seconds, and
those of a message between stages, are played through the schedule (schedule/replay.py). When its
own last action has ended, a stage starts its sums of once a step: gradients over dp, parameters
that it shares and the norm over pp. The step is over when the last stage has done so. Of that the
busiest stage's own work is compute, tp, cp, dp and a part of pp; bubble is what it waits where
messages between stages take no time, and the rest of pp what the step takes longer as they do.

It is a floor and is called one: real kernels run below the peak of a datasheet. For the cpu device,
whose figure is a measured matmul rate, it is close.

By hand, 1F1B on 2 stages that take F = 1, B = 2 and F = 2, B = 4, m = 3, no messages: stage 1 waits
1 and works 18, then stage 0 does its last backward: 1 + 18 + 2 = 21, compute 18 and bubble 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mpctl.estimate.communication import held_by
from mpctl.estimate.flops import pass_flops, step_flops
from mpctl.estimate.messages import STATUS_BYTES, Message, pass_messages, sent
from mpctl.estimate.network import MissingLink, Network
from mpctl.estimate.pipeline import Stages, hand_overs, shared_parameters
from mpctl.families.table import Held, OperatorTable
from mpctl.schedule.orders import Kind, Place, actions
from mpctl.schedule.replay import Transfer, replay
from mpctl.spec.job import JobSpec
from mpctl.spec.model import Model
from mpctl.topology import Topology
from mpctl.units import DTYPE_BYTES

ChunkSeconds = Mapping[Kind, float]
PARTS: tuple[Kind, ...] = ("forward", "backward_input", "backward_weight")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step, by part: of the busiest stage."""

    compute: float
    bubble: float
    tp: float
    cp: float
    dp: float
    pp: float
    flops_per_rank: float

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.tp + self.cp + self.dp + self.pp


def find_step_time(
    job: JobSpec, model: Model, table: OperatorTable, stages: Stages, topology: Topology,
    messages: Sequence[Sequence[Message]],
) -> StepTime | str:  # fmt: skip
    """The floor, or in words what is missing to state one. messages: of each stage."""
    device = job.cluster.device
    if device is None:
        return "no cluster.device is named"
    rate = device.peak_flops.get(job.training.dtype)
    if rate is None:
        return f"{device.name} has no {job.training.dtype} rate in its preset"
    floor = _Floor(job, model, table, stages, Network(job.cluster, topology), rate)
    try:
        return floor.step(messages)
    except MissingLink as missing:
        return str(missing)


@dataclass(frozen=True)
class _Floor:
    job: JobSpec
    model: Model
    table: OperatorTable
    stages: Stages
    network: Network
    rate: float

    def step(self, messages: Sequence[Sequence[Message]]) -> StepTime:
        """messages: of each stage."""
        own = [self._own(stage, found) for stage, found in enumerate(messages)]
        if len(own) == 1:
            return own[0]
        own = [replace(time, pp=pp) for time, pp in zip(own, self._sums(), strict=True)]
        idle = self._idle()
        prompt, late = (
            max(time.total + waits for time, waits in zip(own, found, strict=True))
            for found in (idle(_at_once), idle(self._transfer()))
        )
        busiest = max(own, key=lambda time: time.total)
        return replace(busiest, bubble=prompt - busiest.total, pp=busiest.pp + late - prompt)

    def _own(self, stage: int, messages: Iterable[Message]) -> StepTime:
        """What a stage works by itself."""
        seconds = {"tp": 0.0, "cp": 0.0, "dp": 0.0}
        for message in messages:
            if message.axis in seconds:
                seconds[message.axis] += self.network.collective(message)
        flops = step_flops(self.job, self.model, self.table, self.stages[stage], stage=stage)
        return StepTime(flops / self.rate, 0.0, **seconds, pp=0.0, flops_per_rank=flops)

    def _sums(self) -> list[float]:
        """Seconds of each stage in sums over the pipeline: what it shares, and the norm."""
        width, tp = DTYPE_BYTES[self.job.training.reduced_dtype], self.job.parallel.tp
        seconds = [self.network.sum_over(range(len(self.stages)), STATUS_BYTES)] * len(self.stages)
        for shared in shared_parameters(self.job, self.table, self.stages):
            size = shared.weight.local_numel(tp) * width
            for stage in shared.stages:
                seconds[stage] += self.network.sum_over(shared.stages, size)
        return seconds

    def _idle(self) -> Callable[[Transfer], list[float]]:
        """From the seconds of a message between stages to those that each stage waits for others
        before its last action has ended."""
        p, m = self.job.parallel, self.job.num_microbatches
        orders = [
            tuple(actions(p.schedule, stage=s, stages=p.pp, microbatches=m, chunks=p.vpp))
            for s in range(p.pp)
        ]
        chunks = [
            [self._chunk(held_by(self.job, self.table, [span], stage=stage)) for span in spans]
            for stage, spans in enumerate(self.stages)
        ]
        work = [m * sum(c["forward"] + c["backward"] for c in row) for row in chunks]

        def idle(transfer: Transfer) -> list[float]:
            line = replay(orders, lambda s, c, kind: chunks[s][c][kind], transfer=transfer)
            return [ends[-1] - busy for ends, busy in zip(line.ends, work, strict=True)]

        return idle

    def _transfer(self) -> Transfer:
        """Between chunks of neighbours."""
        found = hand_overs(self.job, self.model, self.table, self.stages)
        seconds = {(h.sender, h.receiver): self.network.transfer(h) for h in found}
        return lambda sender, receiver: seconds[sender, receiver]

    def _chunk(self, held: list[Held]) -> ChunkSeconds:
        """Seconds of each kind of action; what backward sends belongs to its first part."""
        forward, inputs, weights = (
            pass_flops(self.job, self.model, held, [kind]) / self.rate for kind in PARTS
        )
        ahead, both = self._sent(held, forward_only=True), self._sent(held, forward_only=False)
        forward, inputs = forward + ahead, inputs + both - ahead
        return {"forward": forward, "backward": inputs + weights,
                "backward_input": inputs, "backward_weight": weights}  # fmt: skip

    def _sent(self, held: Iterable[Held], *, forward_only: bool) -> float:
        """Seconds of one micro batch's messages within the stage."""
        found = (
            message for part in held
            for message in pass_messages(self.job, self.model, part, forward_only=forward_only)
        )  # fmt: skip
        return sum(map(self.network.collective, sent(self.job, found)))


def _at_once(sender: Place, receiver: Place) -> float:
    return 0.0
