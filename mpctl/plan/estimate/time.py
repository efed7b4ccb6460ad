"""The time of a step: every operator at the rate that its device reaches, overlapped as the runtime
does.

A stage's chunk takes its layers and ends (operator_times.py) forward and backward, messages over tp
and cp included; the host that launches kernels may be slower than they, and then sets the pace.
ZeRO-3 gathers parameters during each pass. Those seconds, and those of a message between stages, go
through the schedule (timeline.py). When its last action has ended, a stage starts its sums of once
a step: gradients over dp_cp, as far as its last backward did not hide them, and the parameters that
it shares; then the optimizer moves its bytes. The step is over when the last stage is, and the
cores have done the work of all ranks that share them (network.py). The work of the busiest stage is
compute, tp, cp, dp_cp, optimizer and other (host, once a step); bubble is its wait if messages
between stages took no time, pp is what these messages add.

By hand, 1F1B on 2 stages that take F = 1, B = 2 and F = 2, B = 4, m = 3, no messages: stage 1 waits
1 and works 18, then stage 0 does its last backward: 1 + 18 + 2 = 21, compute 18 and bubble 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import log

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.communication import Message, local_parameters
from mpctl.plan.estimate.expert_overlap import overlap, paired_share
from mpctl.plan.estimate.flops import model_and_hardware_flops
from mpctl.plan.estimate.host_times import pipeline_host
from mpctl.plan.estimate.kernels import MissingFigure, OpTimes, cover_backwards, device_speed, pace
from mpctl.plan.estimate.makespan import ChunkPass, ChunkTimes, PipelineTiming
from mpctl.plan.estimate.memory import StageMemory, layout_memory
from mpctl.plan.estimate.messages import StepMessages
from mpctl.plan.estimate.muon import MuonWork
from mpctl.plan.estimate.network import MissingLink, Network, contention_seconds
from mpctl.plan.estimate.offload import gradients_down, link_seconds, overlapped_update, update_and_return
from mpctl.plan.estimate.operator_times import OperatorTimer
from mpctl.plan.estimate.optimizers import RULES
from mpctl.plan.estimate.states import find_states
from mpctl.plan.estimate.step import ClosingTimes, closing_times, find_band
from mpctl.plan.estimate.step import StepTime as StepTime  # the result of StepTimeModel.step
from mpctl.plan.estimate.system import NETWORK, System, find_system
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import RuntimeProfile
from mpctl.spec.schedules import SCHEDULES

PCIE = 64e9  # bytes/s of PCIe 5 x16; links inside a node of more are NVLink's and its like


def find_step_time(layout: JobLayout, profile: RuntimeProfile | None = None) -> StepTime | str:
    """The step's time, or in words what is missing to state one.

    profile: replaces the one that `training.runtime` names.
    """
    try:
        return step_time_model(layout, profile).step()
    except (MissingFigure, MissingLink) as missing:
        return str(missing)


def step_time_model(
    layout: JobLayout, profile: RuntimeProfile | None = None, system: System | None = None
) -> StepTimeModel:
    """The model that times each piece of a step. system: replaces what is assumed of the job's.
    Raises MissingFigure where the device has no rate; timing a message raises MissingLink where a
    link has no bandwidth."""
    job = layout.job
    chosen = profile or layout.profile
    system = system or find_system(job.cluster, chosen)
    speed = device_speed(job.cluster, job.training.chosen_dtype, system.factor)
    network = Network(job.cluster, layout.topology, system)
    return StepTimeModel(layout, OperatorTimer(layout, speed, network, chosen))


@dataclass(frozen=True)
class StepTimeModel:
    """Seconds of one step of a layout, piece by piece. listed: its messages, if another layout that
    differs in the order of axes alone has listed them."""

    layout: JobLayout
    operators: OperatorTimer
    listed: StepMessages | None = None

    @property
    def job(self) -> JobSpec:
        """The job that is timed."""
        return self.layout.job

    @cached_property
    def messages(self) -> StepMessages:
        """All messages of the step: every message timed here is one of them."""
        return self.listed or StepMessages(self.layout, self.operators.profile)

    @property
    def seconds(self) -> float:
        """Seconds of the step without its parts, which take longer to compute. Raises MissingLink
        where a link has no bandwidth."""
        return self._end + self._host_step + self._contention

    @cached_property
    def _after(self) -> list[float]:
        """Seconds of each stage after its last action, sums over pp aside."""
        return [c.dp_cp + c.tp + c.ep + c.world + o for c, o in zip(self._closing, self._optimizer, strict=True)]

    @cached_property
    def _end(self) -> float:
        stages = zip(self.pipeline.ends(), self._after, self._closing, strict=True)
        return max(end + after + closing.pp for end, after, closing in stages)

    @cached_property
    def _works(self) -> list[float]:
        m = self.job.num_microbatches
        return [m * sum(p.chunk.forward + p.chunk.backward for p in row) for row in self.passes]

    @cached_property
    def _contention(self) -> float:
        stages = zip(self._works, self._after, self._closing, strict=True)
        works = [work + after + closing.pp + self._host_step for work, after, closing in stages]
        sharing = self.job.cluster.ranks_per_core
        return contention_seconds(works, sharing, self._end + self._host_step)

    def step(self) -> StepTime:
        """The time of the step. Raises MissingLink where a link has no bandwidth."""
        own, late, works = self.passes, self._end, self._works
        m = self.job.num_microbatches
        closing, optimizer, after = self._closing, self._optimizer, self._after
        busiest = max(range(len(own)), key=lambda s: works[s] + after[s])
        row, once = own[busiest], closing[busiest]
        compute, tp, cp, dp_cp, other, ep = (
            m * sum(getattr(p, name) for p in row) for name in ("compute", "tp", "cp", "dp_cp", "other", "ep")
        )
        waits = late - works[busiest] - after[busiest]
        bubble = min(waits, self._bubble(busiest, works, after)) if len(own) > 1 else 0.0
        model_flops, hardware = model_and_hardware_flops(self.layout)
        speed = self.operators.speed
        return StepTime(
            compute=compute,
            tp=tp + once.tp,
            cp=cp,
            pp=waits - bubble if len(own) > 1 else 0.0,
            dp_cp=dp_cp + once.dp_cp,
            bubble=bubble,
            optimizer=optimizer[busiest],
            other=other + once.world + self._host_step,
            contention=self._contention,
            model_flops=model_flops,
            hardware_flops=hardware,
            peak=speed.peak,
            band=find_band(self.layout, self.operators.profile, speed, self.network_doubt),
            ep=ep + once.ep,
        )

    @cached_property
    def network_doubt(self) -> float:
        """Spread of the step's logarithm by that of the seconds of messages between nodes where
        nobody measured them: of their logarithm, log(NETWORK), times their part of the step."""
        network = self.operators.network
        if network.system.is_measured or not network.is_unmeasured:
            return 0.0
        return log(self.slower(NETWORK).seconds / self.seconds)

    def slower(self, messages: float = 1.0, kernels: float = 1.0) -> StepTimeModel:
        """The same step where all messages, or all kernels, take so many times as long."""
        timer, job = self.operators, self.job
        system = timer.network.system
        factor = system.factor * kernels
        speed = device_speed(job.cluster, job.training.chosen_dtype, factor)
        links = Network(job.cluster, self.layout.topology, system._replace(factor=system.factor * messages))
        return StepTimeModel(self.layout, OperatorTimer(self.layout, speed, links, timer.profile))

    def layer(self) -> ChunkTimes:
        """One layer of the first stack alone, kernels only, comparable with benches of single
        layers."""
        table = self.layout.table
        stack, flow = table.stacks[0], table.flows[0].runs[0][1]
        work = self.operators.block(stack, flow)
        forward = work.forward + work.tp_forward + work.cp_forward + work.ep_forward
        back = work.dgrad + work.tp_backward + work.cp_backward + work.ep_backward
        return ChunkTimes(forward, back, work.wgrad)

    def _bubble(self, busiest: int, works: Sequence[float], after: Sequence[float]) -> float:
        """Seconds that the busiest stage would wait if messages between stages took no time."""
        still = self.pipeline._replace(ahead=[0.0] * len(self.pipeline.ahead), back=[0.0] * len(self.pipeline.back))
        ends = [e + a for e, a in zip(still.ends(), after, strict=True)]
        return max(max(ends) - works[busiest] - after[busiest], 0.0)

    @cached_property
    def passes(self) -> list[list[ChunkPass]]:
        """[stage][chunk]. Stages that hold the same parts share one."""
        stages = self.layout.stages
        return self.layout.of_stages(lambda stage: [self._pass(stage, chunk) for chunk in range(len(stages[stage]))])

    def _pass(self, stage: int, chunk: int) -> ChunkPass:
        work, waits = OpTimes(), 0.0
        for part in self.layout.chunk_slices(stage, chunk):
            for layers, flow in part.blocks:
                work.add(self.operators.block(part.stack, flow), layers)
                waits += layers * self.operators.waits(flow) * self.operators.factor
                work.host_forward += layers * self._crossing
                work.host_backward += layers * 2 * flow.after * self._crossing
            for end in part.ends:
                work.add(self.operators.end(end))
        if self.layout.head_stage != self.layout.loss_stage:
            held = (stage == self.layout.loss_stage) - (stage == self.layout.head_stage)
            work.add(self.operators.loss(self.layout.table.flows[-1].exit), held)
        if share := self.operators.overlapped:
            paired = share * paired_share(self.layout, stage)
            overlap(work, paired, waits, self.operators.profile.overlap.drag)
        return self._paced(work, self.messages.gradients.chunk(stage, chunk), self._uploads[stage])

    @cached_property
    def _crossing(self) -> float:
        operators = self.operators
        return pipeline_host(operators.profile.host, self.job.parallel, operators.network)

    def _paced(self, work: OpTimes, messages: Sequence[Message], upload: float = 0.0) -> ChunkPass:
        """The slower of the kernels and their host, plus ZeRO's messages that they do not hide. upload:
        seconds of parameters on their way from the host, in each direction's pass."""
        profile, slow = self.operators.profile, self.operators.speed.host
        sends = profile.host.message * (self.job.parallel.pp > 1)
        forward = work.forward + work.tp_forward + work.cp_forward + work.ep_forward
        backward = work.dgrad + work.wgrad + work.tp_backward + work.cp_backward + work.ep_backward
        host = profile.host.micro_batch + sends
        host_forward = slow * (work.host_forward + host)
        host_backward = slow * (work.host_backward + host)
        gather = self._gather_factor * self._seconds(m for m in messages if m.phase == "forward") + upload
        scatter = self._gather_factor * self._seconds(m for m in messages if m.phase == "backward") + upload
        paced = sum if self.operators.speed.waits else pace
        ahead, back = paced((forward, host_forward)), paced((backward, host_backward))
        zero_ahead = self._added_by(ahead, gather)
        zero_back = self._added_by(back, scatter)
        splits = SCHEDULES[self.job.parallel.schedule].splits_backward
        weights = min(work.wgrad, back) if splits else 0.0
        compute = work.forward + work.dgrad + work.wgrad
        return ChunkPass(
            ChunkTimes(ahead + zero_ahead, back + zero_back - weights, weights),
            compute,
            work.tp_forward + work.tp_backward,
            work.cp_forward + work.cp_backward,
            zero_ahead + zero_back,
            (ahead - forward) + (back - backward),
            work.ep_forward + work.ep_backward,
        )

    @cached_property
    def _gather_factor(self) -> float:
        """Seconds of ZeRO's messages relative to their link's, where adapters are trained on devices that
        reach each other over PCIe alone (AdapterCosts.pcie_gathers)."""
        cluster, link = self.job.cluster, self.job.cluster.intra_node
        most = self.operators.profile.adapters.pcie_gathers if self.job.training.adapter else 0.0
        if not most or link is None or cluster.nodes > 1 or link.bandwidth > PCIE:
            return 1.0
        return max(1.0, link.bandwidth * link.efficiency / most)

    def _seconds(self, messages: Iterable[Message]) -> float:
        return sum(map(self.operators.network.seconds, messages))

    def _added_by(self, seconds: float, messages: float) -> float:
        """Seconds that `messages` seconds of overlapping messages add to `seconds` of work."""
        overlap = self.operators.profile.overlap
        hidden = min(self._overlap_share(overlap.zero) * messages, seconds)
        return messages - hidden + overlap.drag * hidden

    def _overlap_share(self, share: float) -> float:
        """The share of a message that overlaps with other work: 0 on a CPU, where the same thread
        does both, and where the job turns it off."""
        can = self.job.parallel.overlap_gradients and not self.operators.speed.waits
        return share if can else 0.0

    @cached_property
    def pipeline(self) -> PipelineTiming:
        """The schedule's part of the step."""
        ahead: list[float] = []
        back: list[float] = []
        if self.job.parallel.pp > 1:
            overlap = self.operators.profile.overlap
            for transfer in self.messages.transfers:
                seconds = (1 - overlap.pp) * self._seconds(transfer.messages)
                (ahead if transfer.is_forward else back).append(seconds)
        chunks = [[found.chunk for found in row] for row in self.passes]
        return PipelineTiming(self.job.parallel.schedule, chunks, ahead, back, self.job.num_microbatches)

    @cached_property
    def _trained(self) -> list[dict[str, int]]:
        layout = self.layout
        return layout.of_stages(
            lambda stage: {view: local_parameters(layout, stage, trained_only=True, view=view) for view in layout.views}
        )

    @cached_property
    def _closing(self) -> list[ClosingTimes]:
        stages = self.layout.of_stages(self._closing_of)
        if not self._is_chained:
            return stages
        sums = [*accumulate(stage.dp_cp for stage in reversed(stages))][::-1]
        return [stage._replace(dp_cp=seconds) for stage, seconds in zip(stages, sums, strict=True)]

    @cached_property
    def _is_chained(self) -> bool:
        """Whether the sums of gradients of all stages follow one another (`overlap.chained`)."""
        parallel = self.job.parallel
        return self.operators.profile.overlap.chained and parallel.pp > 1 and not parallel.zero

    def _closing_of(self, stage: int) -> ClosingTimes:
        """Gradients overlap with the last backward, parameters with that or the first forward; the
        rest comes after."""
        operators = self.operators
        back = 0.0 if self._is_chained else self._overlap_share(self._last_backward(stage))
        ahead = self._overlap_share(sum(p.chunk.forward for p in self.passes[stage]))
        messages = self.messages.once_a_step(stage)
        return closing_times(messages, operators.network, operators.profile.overlap, back, ahead)

    def _last_backward(self, stage: int) -> float:
        """Seconds of a stage's work that may hide its gradients and parameters."""
        row = self.passes[stage]
        covers = cover_backwards(self.job.parallel.pp, len(row))
        return covers * sum(p.chunk.backward for p in row)

    @cached_property
    def _optimizer(self) -> list[float]:
        """Seconds in which each stage moves gradients, moments and masters once a step."""
        operators, t = self.operators, self.job.training
        shares = {n: v.zero_size if v.zero else 1 for n, v in self.layout.views.items()}
        if t.offload_optimizer and self._has_host:
            stepped = [sum(count / shares[view] for view, count in held.items()) for held in self._trained]
            share = t.offload_fraction
            on_host = [self._host_update(stage, share * elements) for stage, elements in enumerate(stepped)]
            rest = [operators.optimizer_seconds(round((1 - share) * elements)) for elements in stepped]
            return [own + left for own, left in zip(on_host, rest, strict=True)]
        seconds = [
            sum(operators.optimizer_seconds(count) / shares[view] for view, count in held.items())
            for held in self._trained
        ]
        if t.optimizer == "muon":
            steps = self.layout.of_stages(MuonWork(self.layout).flops)
            rate = operators.speed.other.flops
            seconds = [own + flops / rate for own, flops in zip(seconds, steps, strict=True)]
        if RULES[t.optimizer].is_paged and self._has_host:
            return [own + self._paging(stage) for stage, own in enumerate(seconds)]
        return seconds

    @property
    def _has_host(self) -> bool:
        """Whether states may be in another memory than the device's."""
        return self.job.device_kind != "cpu"

    def _host_update(self, stage: int, elements: float) -> float:
        """Seconds of an update on the host of so many elements; gradients go there beside the last
        backward, unless the update copies them itself."""
        profile = self.operators.profile
        down = gradients_down(self.layout, profile, elements)
        if self.job.training.offload_overlap:
            return overlapped_update(self.layout, down, elements)
        share = 0.0 if profile.host.update else self._overlap_share(profile.overlap.zero)
        hidden = min(share * down, self._last_backward(stage))
        return down - hidden + update_and_return(self.layout, elements)

    def _paging(self, stage: int) -> float:
        """Seconds in which paged states that the device has no room for come and go."""
        room, found = self.job.cluster.usable_bytes, self._memory[stage]
        paged = find_states(self.layout, stage).paged
        lacking = 0 if room is None else min(paged, max(0, found.device_bytes + paged - room))
        return link_seconds(self.layout, 2 * lacking)

    @cached_property
    def _memory(self) -> list[StageMemory]:
        return layout_memory(self.layout)

    @cached_property
    def _uploads(self) -> list[float]:
        """Seconds in which a rank's share of the parameters of a chunk of each stage comes from its host."""
        if not (self.job.training.offload_parameters and self._has_host):
            return [0.0 for _ in self.layout.stages]
        layout = self.layout
        chunks = len(layout.stages[0])
        return layout.of_stages(lambda stage: link_seconds(layout, find_states(layout, stage).fetched / chunks))

    @property
    def _host_step(self) -> float:
        host = self.operators.profile.host.step_on(self.job.device_kind != "cpu")
        return self.operators.speed.host * host
