"""Running a pipeline stage: its program's actions, and the messages between them.

Forward, a chunk takes the states before it and gives those behind it; backward it takes their
gradients and gives those of what it took (PipeDream-flush, arXiv 2104.04473, section 2.2). Each
tensor is one message, point to point, reported to `record` by its sender with this rank's bytes. A
gradient travels where anything trained lies before (`OperatorTable.boundary_needs`), zeros if none
came about, so that what is sent depends on the plan alone. Under zero-bubble (arXiv 2401.10241) the
gradients of the layers' matrices are put off (kernels/deferred_wgrad.py) to an action of their own;
that of the head, of whose rows a rank may use some only, comes at once.

Messages carry no tags: between two ranks they match in order. pipeline/schedule/program.py puts
them in one line, in which even sends that wait for their receive come to an end. So a receive is
posted where the line has it, before what it is for, and waited for there; a send is left to travel,
and once two are under way the oldest is waited for, to bound what they keep. What has been sent is
let go: of a chunk's result backward needs the place in the graph, not the values.

By hand, gpt of 2 stages, 1f1b, 4 micro batches: stage 0 sends 4 hidden states, stage 1 4 gradients.

Letters: b batch, s sequence, h hidden; t tp, c cp.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mpctl.families.batch import Batch, FamilyModule, State
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.deferred_wgrad import Deferred, DeferredWgrad, defer_wgrad
from mpctl.kernels.linear import ColumnParallelLinear, RowParallelLinear
from mpctl.pipeline.schedule.orders import Action, StageChunk
from mpctl.pipeline.schedule.program import Program, Step, program
from mpctl.runtime.partition import PipelinePartition, StageBoundary
from mpctl.runtime.pass_listener import PassListener
from mpctl.transport.group import Collective, Group, Work

MAX_SENDS_IN_FLIGHT = 2  # messages that are kept until they have left


class PipelineRunner:
    """One rank's stage; a model in one stage is a pipeline without messages.

    at: what it is doing, None between steps; on_move is called when that changes. listener: is told
    of every action.
    """

    def __init__(
        self,
        cut: PipelinePartition,
        chunks: Sequence[FamilyModule],
        group: Group,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.cut, self.chunks, self.group = cut, chunks, group
        self.dtype, self.device = dtype, device
        self.at: Step | None = None
        self.on_move: Callable[[], None] = lambda: None
        self.listener = PassListener()
        p, micro_batches = cut.job.parallel, cut.job.num_microbatches
        # Alone, nothing is gained by holding more than one micro batch.
        schedule = p.schedule if cut.stages > 1 else "1f1b"
        self.later = DeferredWgrad()
        if schedule == "zero-bubble":
            for module in (module for chunk in chunks for module in chunk.modules()):
                if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                    defer_wgrad(module.weight, self.later)
        self.program = program(
            schedule, stage=cut.stage, stages=cut.stages, microbatches=micro_batches, chunks=p.vpp
        )

    @property
    def where(self) -> str:
        """`, stage 1, forward of micro batch 3`, of several stages."""
        if self.at is None or self.cut.stages == 1:
            return ""
        kind, micro_batch, chunk = self.at.action
        of = f" in chunk {chunk}" if len(self.chunks) > 1 else ""
        word = kind.replace("_", " ")
        return f", stage {self.cut.stage}, {word} of micro batch {micro_batch}{of}"

    def move(self, step: Step | None) -> None:
        self.at = step
        self.on_move()

    def train(self, batches: Iterator[Batch], *, step: int, scale: float = 1.0) -> float:
        """Gradients of a step's micro batches, times `scale`; this rank's share of the mean loss,
        which only the last stage knows."""
        training = self.cut.job.training
        samples = training.global_batch_size or 1
        run = _ProgramRun(self, batches, samples, seed=training.seed, step=step, scale=scale)
        return run.through(self.program)

    def evaluate(self, batches: Sequence[Batch], *, counted: int) -> float:
        """The sum of this rank's losses without dropout, on the last stage, over the first
        `counted` of the micro batches; the others are computed and left out of the sum."""
        run = _ProgramRun(self, iter(batches), 1, counted=counted)
        return run.through(self._forwards(len(batches)))

    def _forwards(self, count: int) -> Program:
        """The forward part of a training step's line is one itself, and so are its first micro
        batches: of chunks the line needs as many as fill the stages."""
        stages, chunks = self.cut.stages, len(self.chunks)
        steps = program(
            "interleaved" if chunks > 1 else "gpipe",
            stage=self.cut.stage, stages=stages, microbatches=-(-count // stages) * stages,
            chunks=chunks,
        ) if count else []  # fmt: skip
        return [
            step for step in steps
            if step.action.kind == "forward" and step.action.microbatch < count
        ]  # fmt: skip


@dataclass(frozen=True)
class _SavedGraph:
    """inputs: states whose gradients are handed on; edges: where backward enters the graph, which
    keeps of an output's values only what it needs; ends: the gradient of a loss."""

    inputs: State
    edges: list[GradientEdge | None]
    ends: list[Tensor]


@dataclass
class _ProgramRun:
    """One way through a program. kept: what a backward starts from; deferred: weights' gradients by
    micro batch; read: micro batches taken from the source, of which `batches` are still needed;
    step None: no noise; counted: how many micro batches' losses are summed, None for all."""

    line: PipelineRunner
    source: Iterator[Batch]
    samples: int
    seed: int = 0
    step: int | None = None
    scale: float = 1.0
    counted: int | None = None
    loss: float = 0.0
    read: int = 0
    batches: dict[int, Batch] = field(default_factory=dict)
    kept: dict[tuple[int, int], _SavedGraph] = field(default_factory=dict)
    deferred: dict[int, list[Deferred]] = field(default_factory=dict)
    arriving: dict[Action, list[tuple[Tensor, Work]]] = field(default_factory=dict)
    made: dict[Action, list[Tensor]] = field(default_factory=dict)
    leaving: deque[tuple[Tensor, Work]] = field(default_factory=deque)

    def through(self, steps: Iterable[Step]) -> float:
        for step in steps:
            self.line.move(step)
            if step.peer is None:
                self._compute(step.action)
            elif step.verb == "send":
                self._send(step.action, step.peer)
            else:
                self._receive(step.action, step.peer)
        self._land(0)
        self.line.move(None)
        return self.loss

    def _compute(self, action: Action) -> None:
        given = self.arriving.pop(action, [])
        for _, work in given:
            work.wait()
        tensors = [tensor for tensor, _ in given]
        self.line.listener.begin(action)
        if action.kind == "backward_weight":
            for deferred in self.deferred.pop(action.microbatch):
                deferred()
        elif action.kind == "forward":
            self.made[action] = self._forward(action, tensors)
        else:
            self.made[action] = self._backward(action, tensors)
            self.deferred[action.microbatch] = self.line.later.take()
        self.line.listener.end(action)

    def _forward(self, action: Action, given: Sequence[Tensor]) -> list[Tensor]:
        """States to hand on; of the last chunk none, but its loss."""
        before, behind = self.line.cut.borders[action.chunk]
        batch = self._batch(action.microbatch)
        noise = None if self.step is None else CounterRNG(self.seed, self.step, batch.samples)
        inputs = tuple(t.requires_grad_(n) for t, n in zip(given, before.needs, strict=True))
        outputs = self.line.chunks[action.chunk].advance(inputs, batch, noise)
        if not behind.shapes:
            (loss,) = outputs
            outputs = (loss / self.samples,)
            if self.counted is None or action.microbatch < self.counted:
                self.loss += float(outputs[0].detach())
        if torch.is_grad_enabled():
            lost = [s for s, need in _paired(outputs, behind) if s.requires_grad and not need]
            assert not lost, f"{action}: a state needs a gradient that is not sent"
            needed = [state for state, need in _paired(outputs, behind) if need]
            ends = [] if behind.shapes else [torch.full_like(s, self.scale) for s in needed]
            self.kept[action.microbatch, action.chunk] = _SavedGraph(
                inputs, [get_gradient_edge(s) if s.requires_grad else None for s in needed], ends
            )
        elif action.chunk == len(self.line.chunks) - 1:
            del self.batches[action.microbatch]
        return [state.detach().contiguous() for state in outputs] if behind.shapes else []

    def _backward(self, action: Action, given: Sequence[Tensor]) -> list[Tensor]:
        """Adds to the parameters' gradients; those of the inputs that need one."""
        before, _ = self.line.cut.borders[action.chunk]
        kept = self.kept.pop((action.microbatch, action.chunk))
        pairs = list(zip(kept.edges, given or kept.ends, strict=True))
        edges = [edge for edge, _ in pairs if edge is not None]
        if edges:  # else all that is trained lies on other ranks
            torch.autograd.backward(edges, [grad for edge, grad in pairs if edge is not None])
        if action.chunk == 0:
            del self.batches[action.microbatch]
        return [_gradient(state) for state, need in _paired(kept.inputs, before) if need]

    def _batch(self, micro_batch: int) -> Batch:
        """The chunks of a stage meet each micro batch in order; the first to need one reads it."""
        while self.read <= micro_batch:
            self.batches[self.read] = next(self.source)
            self.read += 1
        return self.batches[micro_batch]

    def _receive(self, action: Action, peer: StageChunk) -> None:
        before, behind = self.line.cut.borders[action.chunk]
        is_forward = action.kind == "forward"
        border, line = before if is_forward else behind, self.line
        b = len(self._batch(action.microbatch).samples)
        self.arriving[action] = []
        for shape, need in zip(border.shapes, border.needs, strict=True):
            if is_forward or need:
                buffer = torch.empty((b, *shape), dtype=line.dtype, device=line.device)
                work = dist.irecv(buffer, group=line.group.process_group, group_src=peer.stage)
                assert work is not None, "this rank is in its pipeline's group"
                self.arriving[action].append((buffer, work))

    def _send(self, action: Action, peer: StageChunk) -> None:
        group = self.line.group
        for tensor in self.made.pop(action):
            if group.record is not None:
                dtype = str(tensor.dtype).removeprefix("torch.")
                group.record(Collective("send", group.name, tensor.nbytes, dtype))
            work = dist.isend(tensor, group=group.process_group, group_dst=peer.stage)
            assert work is not None, "this rank is in its pipeline's group"
            self.leaving.append((tensor, work))
        self._land(MAX_SENDS_IN_FLIGHT)

    def _land(self, most: int) -> None:
        """Wait for the oldest messages sent until at most so many are under way."""
        while len(self.leaving) > most:
            _, work = self.leaving.popleft()
            work.wait()


def _paired(states: State, border: StageBoundary) -> Iterable[tuple[Tensor, bool]]:
    """With whether each needs a gradient; a loss, which no border names, does."""
    return zip(states, border.needs or (True,) * len(states), strict=True)


def _gradient(state: Tensor) -> Tensor:
    return torch.zeros_like(state) if state.grad is None else state.grad.contiguous()
