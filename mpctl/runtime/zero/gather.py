"""ZeRO 3's parameters come before they are used and go after: by layer, the ends by chunk.

Forward gathers a layer when it enters it, having started that of the next one before; backward
again, from the last to the first, where any gradient passes. What is not a layer's (embeddings, the
head, a table that all layers of a stack add) is there from the beginning of a chunk's pass to its
end, because a tied table is needed at both. A weight's gradient that is put off needs no values.

By hand, layers 1 and 2: forward holds the ends and 1 and 2; backward, in layer 1, the ends and 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpctl.layout.buckets import Bucket
from mpctl.pipeline.schedule.orders import Action
from mpctl.runtime.pass_listener import PassListener
from mpctl.runtime.zero.param_store import Zero3ParamStore


class ParameterGatherer(PassListener):
    """Of one stage, whose chunks take turns."""

    def __init__(self, stores: Sequence[Zero3ParamStore]) -> None:
        self.stores = stores
        self.here: list[Zero3ParamStore] = []  # those that the chunk under way uses

    def begin(self, action: Action) -> None:
        if action.kind == "backward_weight":
            return
        self.is_backward = action.kind != "forward"
        self.here = [s for s in self.stores if action.chunk in s.block.bucket.chunks]
        ends = [store for store in self.here if not store.block.bucket.layer]
        for store in ends:
            store.start()
        self._start_next(None)
        for store in ends:
            store.gather()

    def enter(self, unit: int) -> None:
        if not self.is_backward:
            self._gather(unit)

    def leave(self, unit: int) -> None:
        if not self.is_backward:
            for store in self._at(unit):
                store.free()

    def back(self, unit: int) -> None:
        for store in self.here:
            if store.block.bucket.layer and store.block.bucket.unit > unit:
                store.free()
        self._gather(unit)

    def end(self, action: Action) -> None:
        for store in self.here:
            store.free()
        self.here = []

    def _gather(self, unit: int) -> None:
        found = self._at(unit)
        for store in found:
            store.start()
        self._start_next(unit)
        for store in found:
            store.gather()

    def _at(self, unit: int) -> list[Zero3ParamStore]:
        return [s for s in self.here if s.block.bucket.layer and s.block.bucket.unit == unit]

    def _start_next(self, unit: int | None) -> None:
        """The layer that the pass meets after `unit`, or first."""
        met = [b.unit for b in (store.block.bucket for store in self.here) if self._is_met(b)]
        if self.is_backward:
            ahead = [u for u in met if unit is None or u < unit]
        else:
            ahead = [u for u in met if unit is None or u > unit]
        if ahead:
            for store in self._at(max(ahead) if self.is_backward else min(ahead)):
                store.start()

    def _is_met(self, bucket: Bucket) -> bool:
        return bool(bucket.layer) and (bucket.goes_back or not self.is_backward)
