"""Reduce a bucket's gradients as soon as they are complete, while backward goes on.

ZeRO 0 and 1 reduce once a step, in the last backward that adds to a bucket; 2 and 3 in every one.
In that backward a bucket starts when backward reaches a unit before the bucket's first; the
remaining ones start at its end. Deferred weight gradients (train/layers/parameters.py) are computed in a
separate action, one after the other, and their buckets start there. Pending reductions are waited
for after the schedule; at 2 and 3 at most one is pending, which bounds the number of full-size
gradients.

Where several groups of ranks divide the buckets (`parallel.zero_size`), equal slices are summed
over these groups as soon as they are complete: from the start of the next bucket on, if messages
travel while a rank computes, else after the schedule. Every rank starts these sums in one order.

By hand, 1f1b of m micro batches on one stage, ZeRO 0: all start in the backward of m - 1, none
before; ZeRO 2: each of m backwards starts all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from torch import Tensor

from mpctl.model.layout.buckets import MAX_REDUCTIONS_IN_FLIGHT
from mpctl.model.pipeline.schedule.orders import Action
from mpctl.train.layers.parameters import deferred_wgrad_of
from mpctl.train.runtime.pass_listener import PassListener
from mpctl.train.runtime.zero.gradients import BucketGradients, GradientBuffer
from mpctl.train.transport.group import Pending

Inspect = Callable[[BucketGradients], None]


class GradientOverlap(PassListener):
    """Starts the reductions of a buffer's buckets while the pipeline's actions run.

    actions: those of a training step, in order. early: start a bucket as soon as it is complete,
    otherwise when all are.
    """

    def __init__(self, buffer: GradientBuffer, actions: Iterable[Action], *, early: bool) -> None:
        self.buffer, self.stores, self.early = buffer, buffer.stores, early
        self.deferred = [{p for p in s.shard.parameters if deferred_wgrad_of(p)} for s in self.stores]
        self.last: dict[int, Action] = {}  # the action that completes a bucket, by its number
        for action in actions:
            self.last |= dict.fromkeys(self._completed_by(action), action)
        self.inspect: Inspect | None = None
        self.unreduced: set[int] = set()
        self.action: Action | None = None
        self.due: list[int] = []  # buckets that the current action is to reduce
        self.missing: list[set[Tensor]] = []  # deferred gradients not computed yet, by bucket, from `weights` on
        self.in_flight: deque[tuple[BucketGradients, Pending, bool]] = deque()
        self.equal_in_flight: list[Pending] = []  # sums of slices that several ranks hold
        for parameter in set[Tensor]().union(*self.deferred):
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # after the store's

    def _completed_by(self, action: Action) -> list[int]:
        """Buckets that an action completes; a bucket with deferred gradients is completed by the
        action that computes them, which a backward in one does at its end."""
        completes = {"forward": (), "backward_input": (False,), "backward_weight": (True,)}
        kinds = completes.get(action.kind, (False, True))
        return [
            i
            for i, store in enumerate(self.stores)
            if action.chunk in store.shard.bucket.chunks and bool(self.deferred[i]) in kinds
        ]

    @property
    def passing_tensors(self) -> list[Tensor]:
        """The gradients that exist until they are copied or reduced, and those being reduced."""
        reducing = [tensor for _, pending, _ in self.in_flight for tensor in pending.tensors]
        return [*reducing, *(tensor for store in self.stores for tensor in store.passing_tensors)]

    def restart(self, inspect: Inspect | None = None) -> None:
        """Expect every bucket again, before a step. inspect: called with each bucket before it is
        reduced."""
        self.inspect = inspect
        self.unreduced = set(range(len(self.stores)))

    def begin(self, action: Action) -> None:
        """Note which buckets the action is to reduce."""
        self.action = action
        self.due = [
            i
            for i in self._completed_by(action)
            if self.stores[i].reduces_each or (self.early and self.last[i] == action)
        ]
        self.missing = []

    def weights(self) -> None:
        """From now on deferred gradients are added."""
        self.missing = [set(parameters) for parameters in self.deferred]

    def back(self, unit: int) -> None:
        """Start the buckets that are complete: all of their units are done."""
        if self.early:
            complete = (i for i in self.due if self.stores[i].shard.bucket.unit > unit)
            self._start([i for i in complete if not self.deferred[i]])

    def _accumulated(self, parameter: Tensor) -> None:
        """A deferred gradient was added; buckets start in one order on all replicas."""
        if not self.missing:  # a backward in one: autograd calls the hook without a gradient too
            return
        for i in self.due:
            self.missing[i].discard(parameter)
        while self.early and self.due and self._is_complete(self.due[0]):
            self._start(self.due[:1])

    def _is_complete(self, number: int) -> bool:
        return bool(self.deferred[number]) and not self.missing[number]

    def end(self, action: Action) -> None:
        """Start the remaining buckets of the action."""
        self._start(list(self.due))
        if not self.early:
            self._wait(0)

    def finish(self) -> None:
        """After the schedule, reduce the remaining buckets and wait for all reductions."""
        self._start([i for i in sorted(self.unreduced) if not self.stores[i].reduces_each])
        self._wait(0)
        for pending in self.equal_in_flight:
            pending.wait()
        self.equal_in_flight.clear()

    def _start(self, numbers: list[int]) -> None:
        for i in numbers:
            self.stores[i].settle()
            if self.inspect is not None:
                self.inspect(self.stores[i])
            store, shard = self.stores[i], self.stores[i].shard
            is_last = not store.reduces_each or self.last[i] == self.action
            self.in_flight.append((store, store.start(), is_last))
            self.unreduced.discard(i)
            if store.reduces_each or (shard.equal.size > 1 and shard.replicas.sends_beside):
                self._wait(MAX_REDUCTIONS_IN_FLIGHT)
        self.due = [i for i in self.due if i not in numbers]

    def _wait(self, most: int) -> None:
        """Wait for the oldest reductions until at most `most` are pending."""
        while len(self.in_flight) > most:
            store, pending, is_last = self.in_flight.popleft()
            store.accept(pending.wait())
            if is_last and store.shard.equal.size > 1:
                self.equal_in_flight.append(store.start_equal())
