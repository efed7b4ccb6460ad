"""Tensors that ZeRO 2 and 3 hold unsharded during a backward: gradients of buckets until they are
reduced, and at 3 the parameters of layers.

The backwards of a stage are replayed unit by unit (entry, layers, exit), as train/runtime/zero/overlap.py
reduces gradients and train/runtime/zero/gather.py gathers parameters:

- A bucket is whole from the first gradient of its last unit on. When backward reaches a layer, the
  buckets of the units after it are reduced one by one, what is left at the end of the backward. Of
  the reductions under way MAX_REDUCTIONS_IN_FLIGHT are not waited for: a bucket and the slice that
  arrives are there until the next one starts, be it in the backward of the next micro batch.
- At 3 the parameters outside of layers are gathered for the whole backward, those of a layer with
  the next LAYERS_GATHERED_AHEAD.
- A peak is the most of both at one moment: activations are most in the first layers that backward
  takes, buckets from its second on.
- Weight gradients that a schedule puts off are computed in actions of their own, which gather
  nothing, one after the other: each is there until it has been added to its bucket. Gradients of
  biases and norms in their buckets are kept by themselves until then.

By hand, 100 float32 gradients over 2 replicas, padded to 128, in a bucket for each of two layers:
when the second starts the first is under way, 2 x (128 + 64) x 4 = 1,536 bytes. Both in one bucket,
256 with padding: that of the micro batch before is under way, 2 x (256 + 128) x 4 = 3,072.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mpctl.core.sharding import View
from mpctl.model.layout.buckets import LAYERS_GATHERED_AHEAD, MAX_REDUCTIONS_IN_FLIGHT, Bucket
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.pipeline.schedule.orders import FEW_OF_V, actions
from mpctl.plan.estimate.activations import ChunkBytes
from mpctl.spec.schedules import SCHEDULES


class Unsharded(NamedTuple):
    """The most bytes of a rank at one time. backward: by chunk, in its backward before the first
    layer, in each layer, and behind the last; first: by chunk, before the first gradient; weights:
    while gradients that a schedule puts off are computed."""

    backward: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    weights: int = 0


def find_unsharded(layout: JobLayout, stage: int) -> Unsharded | None:
    """Return what a rank of this stage has unsharded at most, or None below ZeRO 2."""
    if all(view.zero < 2 for view in layout.views.values()):
        return None
    parallel, replay = layout.job.parallel, _Replay(layout, stage)
    if parallel.pp > 1 and SCHEDULES[parallel.schedule].splits_backward:
        few = min(layout.num_microbatches, parallel.pp * FEW_OF_V if layout.placement.is_v else parallel.pp + 1)
        place = {"stage": stage, "stages": parallel.pp, "chunks": len(layout.stages[stage])}
        after: dict[tuple[_State, str, int], _State] = {}  # what an action makes of a state, which soon repeat
        state = replay.state
        for action in actions(parallel.schedule, microbatches=few, **place):
            if action.kind == "forward":
                continue
            if (found := after.get((state, action.kind, action.chunk))) is None:
                replay.state = state
                if action.kind != "backward_weight":
                    replay.backward(action.chunk)
                if action.kind != "backward_input":
                    replay.weights(action.chunk)
                found = after[state, action.kind, action.chunk] = replay.state
            state = found
    else:
        times = min(2, layout.num_microbatches)
        for _ in range(times):
            for chunk in reversed(range(len(layout.stages[stage]))):
                for _ in range(times):
                    replay.backward(chunk)
    backward = tuple(tuple(most) for most in replay.most)
    return Unsharded(backward, tuple(replay.first), replay.most_later)


def with_unsharded(chunks: Sequence[ChunkBytes], unsharded: Unsharded | None) -> tuple[ChunkBytes, ...]:
    """The bytes of a stage's chunks with what it has unsharded at the same moment."""
    if unsharded is None:
        return tuple(chunks)
    found = []
    for chunk, most, first in zip(chunks, unsharded.backward, unsharded.first, strict=True):
        beside = most if len(most) > 2 else [max(most)] * 2  # a chunk without layers
        peak = max(
            moment.held - number * moment.freed + (first if moment.is_first else beside[moment.place + number])
            for moment in chunk.moments
            for number in range(moment.number)
        )
        split_peak = chunk.split_peak + max(most)
        found.append(chunk._replace(peak=peak, split_peak=split_peak, late=unsharded.weights))
    return tuple(found)


class _State(NamedTuple):
    """The buckets that are whole, early and in flight between two actions (_Replay)."""

    whole: frozenset[int]
    early: frozenset[int]
    in_flight: tuple[int, ...]


class _Replay:
    """Bytes while backwards run one after the other. most, first, most_later: the largest numbers
    so far, as Unsharded has them; now: the one of `most` that is concerned.

    whole: buckets whose gradients are there in full size; in_flight: those that are being reduced;
    early: those of which some gradients are kept by themselves. gathered: bytes of parameters;
    largest: elements of a gradient that is put off, at most.
    """

    def __init__(self, layout: JobLayout, stage: int) -> None:
        training, parallel = layout.job.training, layout.job.parallel
        self.width, self.reduced = training.value_bytes, training.reduced_bytes
        self.buckets = layout.buckets(stage)
        self.layers = [
            sorted(layout.layer_units(stage, chunk).values(), reverse=True)
            for chunk in range(len(layout.stages[stage]))
        ]
        deferred = frozenset[str]()
        if parallel.pp > 1 and SCHEDULES[parallel.schedule].splits_backward:
            deferred = frozenset(f"{name}.weight" for name in layout.table.linear_layers)
        self.kept = [_kept(bucket, deferred) for bucket in self.buckets]
        put_off = [
            size
            for bucket in self.buckets
            for name, size in zip(bucket.names, bucket.sizes, strict=True)
            if name in deferred
        ]
        self.largest = max(put_off, default=0)
        self.whole, self.early = set[int](), set[int]()
        self.in_flight: deque[int] = deque()
        self.gathered = self.most_later = 0
        self.most = [[0] * (len(units) + 2) for units in self.layers]
        self.first = [0] * len(self.layers)
        self.now = 0, 0

    @property
    def state(self) -> _State:
        """What an action changes besides the largest numbers."""
        return _State(frozenset(self.whole), frozenset(self.early), tuple(self.in_flight))

    @state.setter
    def state(self, state: _State) -> None:
        self.whole, self.early, self.in_flight = set(state.whole), set(state.early), deque(state.in_flight)

    def backward(self, chunk: int) -> None:
        """A backward of a chunk, without the weight gradients that are put off."""
        due = [n for n in self._trained(chunk) if self.kept[n] is None]
        self.early |= {n for n in self._trained(chunk) if self.kept[n]}
        gathered = self._gathered(chunk)
        begins = _by_unit(due, (self.buckets[n].last_unit for n in due))
        ends = _by_unit(due, (self.buckets[n].unit for n in due))
        layers, complete = set(self.layers[chunk]), list[int]()
        self.gathered, at, last = gathered[-1], 0, min(layers, default=0)
        self.now = chunk, at
        self.first[chunk] = max(self.first[chunk], self._note(are_late=False))
        for unit in sorted({*layers, *begins, *ends}, reverse=True):
            if unit in layers:
                self.gathered, at = gathered[unit], at + 1
            self.now = chunk, at + (unit < last)
            if unit in layers:
                self._reduce(sorted(complete))
                complete.clear()
            self._fill(begins[unit])
            complete += ends[unit]
        self.now = chunk, len(layers) + 1
        self._reduce(sorted(complete))
        self.gathered = 0

    def weights(self, chunk: int) -> None:
        """The weight gradients that a backward of a chunk has put off: a bucket is reduced once it and
        those before it are complete."""
        due = [n for n in self._trained(chunk) if self.kept[n] is not None]
        begins = _by_unit(due, (self.buckets[n].last_unit for n in due))
        waiting = deque(due)

        def complete(unit: int, view: View | None = None) -> Iterator[int]:
            """The next buckets whose gradients are all there, down to a unit; only of a view."""
            while waiting and waiting[0] in self.whole and self.buckets[waiting[0]].unit >= unit:
                if view not in (None, self.buckets[waiting[0]].view):
                    return
                yield waiting.popleft()

        for unit in sorted({*begins, *(self.buckets[n].unit for n in due)}, reverse=True):
            for number in begins[unit]:  # one after the other in a view, side by side in two
                self._reduce(complete(unit, self.buckets[number].view), are_late=True)
                self._fill([number], are_late=True)
            self._reduce(complete(unit), are_late=True)

    def _trained(self, chunk: int) -> list[int]:
        return [
            number
            for number, bucket in enumerate(self.buckets)
            if bucket.is_trained and bucket.view.zero >= 2 and chunk in bucket.chunks
        ]

    def _gathered(self, chunk: int) -> dict[int, int]:
        """Bytes of gathered parameters by the layer's unit that backward has reached; -1: before
        the first."""
        ends, by_unit = 0, defaultdict[int, int](int)
        for bucket in self.buckets:
            if bucket.view.zero == 3 and chunk in bucket.chunks:
                if not bucket.layer:
                    ends += bucket.padded
                elif bucket.goes_back:
                    by_unit[bucket.unit] += bucket.padded
        units, ahead = self.layers[chunk], LAYERS_GATHERED_AHEAD
        found = {-1: ends + sum(by_unit[unit] for unit in units[:ahead])}
        for at, unit in enumerate(units):
            found[unit] = ends + sum(by_unit[next_] for next_ in units[at : at + 1 + ahead])
        return {unit: size * self.width for unit, size in found.items()}

    def _fill(self, numbers: Iterable[int], *, are_late: bool = False) -> None:
        self.whole.update(numbers)
        self.early -= self.whole
        self._note(are_late=are_late)

    def _reduce(self, numbers: Iterable[int], *, are_late: bool = False) -> None:
        for number in numbers:
            self.in_flight.append(number)
            self.whole.discard(number)
            self._note(are_late=are_late)
            while len(self.in_flight) > MAX_REDUCTIONS_IN_FLIGHT:
                self.in_flight.popleft()

    def _note(self, *, are_late: bool) -> int:
        """Remember what is there now, and return it."""
        buckets = self.buckets
        numel = sum(buckets[n].padded for n in self.whole)
        numel += sum(buckets[n].padded + buckets[n].part for n in self.in_flight)
        numel += sum(self.kept[n] or 0 for n in self.early)
        held = numel * self.reduced
        if are_late:
            self.most_later = max(self.most_later, held + self.largest * self.width)
        else:
            chunk, at = self.now
            held += self.gathered
            self.most[chunk][at] = max(self.most[chunk][at], held)
        return held


def _kept(bucket: Bucket, deferred: frozenset[str]) -> int | None:
    """Elements of the gradients of a bucket that are not put off; None where none is put off."""
    if deferred.isdisjoint(bucket.names):
        return None
    pairs = zip(bucket.names, bucket.sizes, strict=True)
    return sum(size for name, size in pairs if name not in deferred)


def _by_unit(numbers: Sequence[int], units: Iterable[int]) -> defaultdict[int, list[int]]:
    found = defaultdict[int, list[int]](list)
    for number, unit in zip(numbers, units, strict=True):
        found[unit].append(number)
    return found
