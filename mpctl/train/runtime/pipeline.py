"""Runs a pipeline stage: the actions of its program and the messages between stages.

In forward, a chunk takes the states of the previous chunk and returns those for the next; in
backward it takes the gradients of its results and returns those of its inputs (PipeDream-flush,
arXiv 2104.04473, section 2.2). Each tensor is one point-to-point message, which its sender reports
to `record` with this rank's bytes. A gradient is sent if any earlier layer is trained
(`OperatorTable.boundary_needs`), as zeros if backward computed none, so that what is sent depends
on the plan alone. Under zero-bubble (arXiv 2401.10241) the gradients of the layers' matrices are
deferred (train/layers/parameters.py) to a separate action; that of the head is computed at once, since a
rank may use only some of its rows.

Messages carry no tags: between two ranks they match in order. model/pipeline/schedule/program.py puts
them in one order, in which even blocking sends cannot deadlock. So a receive is posted at its place
in that order, before the action that needs it, and waited for when it is needed (p2p.py says over
which group, and on which stream). Sends are asynchronous; when two are pending, the older one is
waited for, which bounds the memory of messages. A tensor that has been sent is released: backward
needs a chunk's result as a node of the graph, not its values.

Letters: b batch, s sequence, h hidden; t tp, c cp.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mpctl.model.layout.job_layout import MAX_SENDS_IN_FLIGHT
from mpctl.model.pipeline.placement import StageChunk
from mpctl.model.pipeline.schedule.orders import DIRECTIONS, Action
from mpctl.model.pipeline.schedule.program import Program, Step, program
from mpctl.train.families.implementation import Batch, FamilyModule, State
from mpctl.train.kernels.counter_rng import CounterRNG, StepKeys
from mpctl.train.layers.parameters import Deferred, DeferredWgrad
from mpctl.train.runtime.activity import Activity
from mpctl.train.runtime.p2p import Direction, StageLinks
from mpctl.train.runtime.partition import PipelinePartition, StageBoundary
from mpctl.train.runtime.pass_listener import PassListener
from mpctl.train.transport.group import Pending


class PipelineRunner:
    """One rank's stage; a model in one stage is a pipeline without messages.

    activity: notified of each step of the program. listeners: notified of every action, in their
    order. keys: keys of the dropout masks as tensors on the device; None computes them on the host.
    deferred_wgrad: where backward puts the gradients that the schedule defers.
    """

    def __init__(
        self,
        partition: PipelinePartition,
        chunks: Sequence[FamilyModule],
        links: StageLinks,
        *,
        dtype: torch.dtype,
        device: torch.device,
        activity: Activity | None = None,
        listeners: Sequence[PassListener] = (),
        keys: StepKeys | None = None,
        deferred_wgrad: DeferredWgrad | None = None,
    ) -> None:
        self.partition, self.chunks, self.links = partition, chunks, links
        self.sample = torch.empty(0, dtype=dtype, device=device)
        self.activity, self.listeners, self.keys = activity or Activity(), listeners, keys
        self.deferred_wgrad = deferred_wgrad or DeferredWgrad()
        self.running: _ProgramRun | None = None

    @property
    def passing_tensors(self) -> list[Tensor]:
        """The messages between stages that exist now, and the buffers of those to come."""
        spares = [spare.buffer for spare in self.links.spares.values()]
        return [*spares, *(self.running.messages if self.running is not None else ())]

    def train(self, batches: Iterator[Batch], *, step: int, scale: float = 1.0) -> Tensor:
        """Add the gradients of a step's micro batches, times `scale`, to the parameters'; returns
        this rank's share of the mean loss, a float64 scalar on the device; 0 on all but the last
        stage."""
        training = self.partition.job.training
        samples = training.global_batch_size or 1
        if self.keys is not None:
            self.keys.fill(step)
        run = _ProgramRun(self, batches, samples, seed=training.seed, step=step, scale=scale)
        return run.execute(self.partition.program)

    def evaluate(self, batches: Sequence[Batch], *, counted: int) -> Tensor:
        """The sum of this rank's losses without dropout over the first `counted` of the micro
        batches; the others are computed but not summed. A float64 scalar on the device; 0 on all
        but the last stage."""
        run = _ProgramRun(self, iter(batches), 1, counted=counted)
        return run.execute(self._forward_program(len(batches)))

    def _forward_program(self, count: int) -> Program:
        """The forward steps of `count` micro batches, cut from a program of a multiple of `stages`
        micro batches, which several chunks need."""
        if not count:
            return []
        stages, chunks = self.partition.stages, len(self.chunks)
        is_v = self.partition.layout.placement.is_v
        steps = program(
            "zbv" if is_v else "interleaved" if chunks > 1 else "gpipe",
            stage=self.partition.stage,
            stages=stages,
            microbatches=-(-count // stages) * stages,
            chunks=chunks,
        )
        return [step for step in steps if step.action.kind == "forward" and step.action.microbatch < count]


@dataclass(frozen=True)
class _SavedGraph:
    """The start of a chunk's backward. inputs: states whose gradients are sent on; edges: where
    backward enters the graph, which does not keep the values of outputs unless it needs them;
    loss_gradients: the gradient of a loss, empty for a chunk that returns states."""

    inputs: State
    edges: list[GradientEdge | None]
    loss_gradients: list[Tensor]


@dataclass
class _ProgramRun:
    """One execution of a program.

    samples: divisor of the losses; step: the training step, None for no dropout; counted: how many
    micro batches' losses are summed, None for all. num_read: micro batches read from the source;
    batches: those of them that are still needed. graphs: by micro batch and chunk; deferred: weight
    gradients still to be computed, alike. received, results: inputs and results of an
    action; handed: inputs that a chunk of this stage has made for the other one, by kind (is of forward),
    micro batch and chunk. sending: pending sends.
    """

    runner: PipelineRunner
    source: Iterator[Batch]
    samples: int
    seed: int = 0
    step: int | None = None
    scale: float = 1.0
    counted: int | None = None
    num_read: int = 0
    batches: dict[int, Batch] = field(default_factory=dict)
    graphs: dict[tuple[int, int], _SavedGraph] = field(default_factory=dict)
    deferred: dict[tuple[int, int], list[Deferred]] = field(default_factory=dict)
    handed: dict[tuple[bool, int, int], list[Tensor]] = field(default_factory=dict)
    received: dict[Action, list[Pending]] = field(default_factory=dict)
    results: dict[Action, list[Tensor]] = field(default_factory=dict)
    sending: deque[Pending] = field(default_factory=deque)

    def __post_init__(self) -> None:
        # Summed on the device: reading each loss would make the host wait for every micro batch.
        self.loss = torch.zeros((), dtype=torch.float64, device=self.runner.sample.device)

    def execute(self, steps: Iterable[Step]) -> Tensor:
        """Do every step of the program; returns the sum of the losses, divided by `samples`."""
        activity = self.runner.activity
        self.runner.running = self
        for step in steps:
            activity.move(step)
            if step.peer is None:
                self._compute(step.action)
            elif step.verb == "send":
                self._send(step.action, step.peer)
            else:
                self._receive(step.action, step.peer)
        self._wait_for_sends(0)
        activity.move(None)
        self.runner.running = None
        return self.loss

    @property
    def messages(self) -> list[Tensor]:
        """Received and not used yet, or not sent completely; without what a chunk sends on as it received
        it (T5's source) and holds for its backward."""
        pending = [*chain.from_iterable(self.received.values()), *self.sending]
        made = chain.from_iterable((*self.results.values(), *self.handed.values()))
        messages = [*made, *(p.result for p in pending)]
        held = {_storage(state) for graph in self.graphs.values() for state in graph.inputs}
        return [message for message in messages if _storage(message) not in held]

    def _compute(self, action: Action) -> None:
        key = action.microbatch, action.chunk
        tensors = self.handed.pop((action.kind == "forward", *key), None)
        if tensors is None:
            tensors = [pending.wait() for pending in self.received.pop(action, [])]
        for listener in self.runner.listeners:
            listener.begin(action)
        if action.kind == "backward_weight":
            self._add_weights(key)
        elif action.kind == "forward":
            self._hand_over(action, self._forward(action, tensors))
        else:
            self._hand_over(action, self._backward(action, tensors))
            self.deferred[key] = self.runner.deferred_wgrad.take()
            if action.kind == "backward":
                self._add_weights(key)
        for listener in self.runner.listeners:
            listener.end(action)

    def _add_weights(self, key: tuple[int, int]) -> None:
        for listener in self.runner.listeners:
            listener.weights()
        for deferred in self.deferred.pop(key):
            deferred()

    def _hand_over(self, action: Action, results: list[Tensor]) -> None:
        """Keep results for their send, or for the chunk of this stage that needs them: the last stage of
        a V."""
        partition = self.runner.partition
        placement, way = partition.layout.placement, DIRECTIONS[action.kind]
        receiver = placement.neighbour(StageChunk(partition.stage, action.chunk), way)
        if receiver is not None and receiver.stage == partition.stage:
            self.handed[way > 0, action.microbatch, receiver.chunk] = results
        else:
            self.results[action] = results

    def _forward(self, action: Action, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the states to send on; the last chunk sends none and adds its loss to the sum."""
        before, behind = self.runner.partition.borders[action.chunk]
        batch = self._batch(action.microbatch)
        rng = self._rng(batch.samples)
        inputs = tuple(t.requires_grad_(n) for t, n in zip(tensors, before.needs, strict=True))
        outputs = self.runner.chunks[action.chunk].stage_forward(inputs, batch, rng)
        if not behind.shapes:
            (loss,) = outputs
            outputs = (loss / self.samples,)
            if self.counted is None or action.microbatch < self.counted:
                self.loss.add_(outputs[0].detach())
        if torch.is_grad_enabled():
            self._save_graph(action, inputs, outputs, behind)
        elif action.chunk == len(self.runner.chunks) - 1:
            del self.batches[action.microbatch]
        return [state.detach().contiguous() for state in outputs] if behind.shapes else []

    def _rng(self, samples: Tensor) -> CounterRNG | None:
        if self.step is None:
            return None
        keys = self.runner.keys
        return CounterRNG(self.seed, self.step, samples) if keys is None else keys.rng(samples)

    def _save_graph(self, action: Action, inputs: State, outputs: State, behind: StageBoundary) -> None:
        pairs = list(_with_needs(outputs, behind))
        lost = [state for state, need in pairs if state.requires_grad and not need]
        assert not lost, f"{action}: a state needs a gradient that is not sent"
        needed = [state for state, need in pairs if need]
        edges = [get_gradient_edge(s) if s.requires_grad else None for s in needed]
        ends = [] if behind.shapes else [torch.full_like(s, self.scale) for s in needed]
        self.graphs[action.microbatch, action.chunk] = _SavedGraph(inputs, edges, ends)

    def _backward(self, action: Action, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Add to the parameters' gradients; returns the gradients of the inputs that need one."""
        before, _ = self.runner.partition.borders[action.chunk]
        graph = self.graphs.pop((action.microbatch, action.chunk))
        pairs = list(zip(graph.edges, gradients or graph.loss_gradients, strict=True))
        edges = [edge for edge, _ in pairs if edge is not None]
        if edges:  # else all trained parameters are on other ranks
            torch.autograd.backward(edges, [grad for edge, grad in pairs if edge is not None])
        if action.chunk == 0:
            del self.batches[action.microbatch]
        return [_gradient(state) for state, need in _with_needs(graph.inputs, before) if need]

    def _batch(self, microbatch: int) -> Batch:
        """The chunks of a stage need micro batches in one order; the first to need one reads it."""
        while self.num_read <= microbatch:
            self.batches[self.num_read] = next(self.source)
            self.num_read += 1
        return self.batches[microbatch]

    def _receive(self, action: Action, peer: StageChunk) -> None:
        runner = self.runner
        before, behind = runner.partition.borders[action.chunk]
        is_forward = action.kind == "forward"
        border = before if is_forward else behind
        direction: Direction = "forward" if is_forward else "backward"
        b = runner.partition.own_samples(len(self._batch(action.microbatch).samples))
        self.received[action] = []
        tensors = zip(border.shapes, border.needs, strict=True)
        for number, (shape, need) in enumerate(tensors):
            if is_forward or need:
                pending = runner.links.start_receive(direction, (b, *shape), runner.sample, peer.stage, number=number)
                self.received[action].append(pending)

    def _send(self, action: Action, peer: StageChunk) -> None:
        direction: Direction = "forward" if action.kind == "forward" else "backward"
        for tensor in self.results.pop(action):
            self.sending.append(self.runner.links.start_send(direction, tensor, peer.stage))
        self._wait_for_sends(MAX_SENDS_IN_FLIGHT)

    def _wait_for_sends(self, most: int) -> None:
        while len(self.sending) > most:
            self.sending.popleft().wait()


def _with_needs(states: State, border: StageBoundary) -> Iterable[tuple[Tensor, bool]]:
    """Pair each state with whether its gradient is sent back: true for a loss, which is in no
    boundary."""
    return zip(states, border.needs or (True,) * len(states), strict=True)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _gradient(state: Tensor) -> Tensor:
    return torch.zeros_like(state) if state.grad is None else state.grad.contiguous()
