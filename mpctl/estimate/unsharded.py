"""What ZeRO 2 and 3 have unsharded for a moment of a backward: gradients of buckets until they are
reduced, and at 3 the parameters of layers.

The backwards of a stage are replayed unit by unit (entry, layers, exit), as runtime/zero/overlap.py
reduces gradients and runtime/zero/gather.py gathers parameters:

- A bucket is whole from the first gradient of its last unit on. When backward reaches a layer, the
  buckets of the units after it are reduced one by one, what is left at the end of the backward. Of
  the reductions under way MAX_REDUCTIONS_IN_FLIGHT are not waited for: a bucket and the slice that
  arrives are there until the next one starts, be it in the backward of the next micro batch.
- At 3 the parameters outside of layers are gathered for the whole backward, those of a layer with
  the next LAYERS_GATHERED_AHEAD.
- Weight gradients that a schedule puts off are computed in actions of their own, which gather
  nothing. Gradients of biases and norms in their buckets are kept by themselves until then.

By hand, 100 float32 gradients over 2 replicas, padded to 128, in a bucket for each of two layers:
when the second starts the first is under way, 2 x (128 + 64) x 4 = 1,536 bytes. Both in one bucket,
256 with padding: that of the micro batch before is under way, 2 x (256 + 128) x 4 = 3,072.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from mpctl.layout.buckets import LAYERS_GATHERED_AHEAD, MAX_REDUCTIONS_IN_FLIGHT, Bucket
from mpctl.layout.job_layout import JobLayout
from mpctl.pipeline.schedule.orders import actions
from mpctl.spec.schedules import SCHEDULES


def unsharded_bytes(layout: JobLayout, stage: int) -> int:
    """The most of a rank of a stage at one time; 0 below ZeRO 2."""
    if all(view.zero < 2 for view in layout.views.values()):
        return 0
    parallel, replay = layout.job.parallel, _Replay(layout, stage)
    if parallel.pp > 1 and SCHEDULES[parallel.schedule].splits_backward:
        few = min(layout.num_microbatches, parallel.pp + 1)
        for action in actions(parallel.schedule, stage=stage, stages=parallel.pp, microbatches=few):
            if action.kind == "backward_input":
                replay.backward(0)
            elif action.kind == "backward_weight":
                replay.weights()
        return replay.most
    times = min(2, layout.num_microbatches)
    for _ in range(times):
        for chunk in reversed(range(len(layout.stages[stage]))):
            for _ in range(times):
                replay.backward(chunk)
    return replay.most


class _Replay:
    """Bytes while backwards run one after the other. most: the largest number so far.

    whole: buckets whose gradients are there in full size; in_flight: those that are being reduced;
    early: those of which some gradients are kept by themselves. gathered: bytes of parameters.
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
        self.whole, self.early = set[int](), set[int]()
        self.in_flight: deque[int] = deque()
        self.gathered = self.most = 0

    def backward(self, chunk: int) -> None:
        """A backward of a chunk, without the weight gradients that are put off."""
        due = [n for n in self._trained(chunk) if self.kept[n] is None]
        self.early |= {n for n in self._trained(chunk) if self.kept[n]}
        gathered = self._gathered(chunk)
        begins = _by_unit(due, (self.buckets[n].last_unit for n in due))
        ends = _by_unit(due, (self.buckets[n].unit for n in due))
        layers, complete = set(self.layers[chunk]), list[int]()
        self.gathered = gathered[-1]
        for unit in sorted({*layers, *begins, *ends}, reverse=True):
            if unit in layers:
                self.gathered = gathered[unit]
                self._reduce(sorted(complete))
                complete.clear()
            self._fill(begins[unit])
            complete += ends[unit]
        self._reduce(sorted(complete))
        self.gathered = 0

    def weights(self) -> None:
        """The weight gradients that a backward has put off: a bucket is reduced once it and those
        before it are complete."""
        due = [n for n in self._trained(0) if self.kept[n] is not None]
        begins = _by_unit(due, (self.buckets[n].last_unit for n in due))
        waiting = deque(due)
        for unit in sorted({*begins, *(self.buckets[n].unit for n in due)}, reverse=True):
            self._fill(begins[unit])
            while waiting and self.buckets[waiting[0]].unit >= unit:
                self._reduce([waiting.popleft()])

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

    def _fill(self, numbers: Iterable[int]) -> None:
        self.whole.update(numbers)
        self.early -= self.whole
        self._note()

    def _reduce(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.in_flight.append(number)
            self.whole.discard(number)
            self._note()
            while len(self.in_flight) > MAX_REDUCTIONS_IN_FLIGHT:
                self.in_flight.popleft()

    def _note(self) -> None:
        buckets = self.buckets
        numel = sum(buckets[n].padded for n in self.whole)
        numel += sum(buckets[n].padded + buckets[n].part for n in self.in_flight)
        numel += sum(self.kept[n] or 0 for n in self.early)
        self.most = max(self.most, self.gathered + numel * self.reduced)


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
