"""Gather parameters: at ZeRO 3 before use, at 1 and 2 after an update.

ZeRO 3's parameters are gathered before use and freed after it: by layer, the others by chunk.

Forward waits for a layer's gather when it enters the layer, and starts those of the next layers
before (LAYERS_GATHERED_AHEAD); backward does the same from the last layer to the first, as far as
gradients flow. Messages of a group run in order, and a layer waits for its gather while nothing
waits for a reduction soon: so backward starts the gather of the layer after next first, then the
reduction of the gradients just computed (as in arXiv 2304.11277, section 3.3.2). Parameters outside
of layers (embeddings, the head, a table that all layers of a stack add) are in memory during the
entire pass of a chunk, because a tied table is needed at both ends. Deferred weight gradients need
no parameter values.

By hand, layers 1 and 2: while forward computes layer 1, the parameters outside of layers and those
of layers 1 and 2 are in memory; while backward computes layer 1, those outside and layer 1's.

At ZeRO 1 and 2 updated parameters are gathered while the next forward already computes. After an
update each replica has its slice of every bucket, and gathers the others (`publish`,
param_store.py) in the order in which forward needs them. A forward waits for a bucket when it
enters the first unit with parameters in the bucket; code that accesses parameters between steps,
such as a checkpoint, waits in the store.

Ranks that exchange messages through shared memory copy them themselves, so that no message
progresses while they compute; a wait in the middle of a forward would only synchronize the ranks.
They wait right after the update.

By hand, buckets of units 0, 2 and 4 (entry 0, layers 1 to 3, exit 4): a forward waits for the first
when it begins, for the second at layer 2, for the third after layer 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from mpctl.model.layout.buckets import LAYERS_GATHERED_AHEAD, Bucket
from mpctl.model.pipeline.schedule.orders import Action
from mpctl.train.runtime.pass_listener import PassListener
from mpctl.train.runtime.zero.param_store import ParamStore, Zero3ParamStore


class ParameterGatherer(PassListener):
    """Gathers and frees the stores of one stage. Its chunks take turns."""

    def __init__(self, stores: Sequence[Zero3ParamStore]) -> None:
        self.stores = stores
        self.active: list[Zero3ParamStore] = []  # those that the current chunk uses
        self.is_backward = False

    def begin(self, action: Action) -> None:
        """Gather the chunk's parameters outside of layers, and start to gather its first layers."""
        if action.kind == "backward_weight":
            return
        self.is_backward = action.kind != "forward"
        self.active = [s for s in self.stores if action.chunk in s.shard.bucket.chunks]
        ends = [store for store in self.active if not store.shard.bucket.layer]
        for store in ends:
            store.start()
        self._start_next(None)
        for store in ends:
            store.gather()

    def enter(self, unit: int) -> None:
        """Gather the layer that forward computes."""
        if not self.is_backward:
            self._gather(unit)

    def leave(self, unit: int) -> None:
        """Free the layer that forward has computed."""
        if not self.is_backward:
            for store in self._layer_stores(unit):
                store.free()

    def back(self, unit: int) -> None:
        """Gather the layer that backward computes; free those that it is done with."""
        for store in self.active:
            if store.shard.bucket.layer and store.shard.bucket.unit > unit:
                store.free()
        self._gather(unit)

    def end(self, action: Action) -> None:
        """Free every parameter of the chunk."""
        for store in self.active:
            store.free()
        self.active = []

    def _gather(self, unit: int) -> None:
        stores = self._layer_stores(unit)
        for store in stores:
            store.start()
        self._start_next(unit)
        for store in stores:
            store.gather()

    def _layer_stores(self, unit: int) -> list[Zero3ParamStore]:
        return [s for s in self.active if s.shard.bucket.layer and s.shard.bucket.unit == unit]

    def _start_next(self, unit: int | None) -> None:
        """Start to gather the layers that the pass computes after `unit`; None: the first ones."""
        buckets = (store.shard.bucket for store in self.active)
        units = {bucket.unit for bucket in buckets if self._is_computed(bucket)}
        if self.is_backward:
            ahead = sorted((u for u in units if unit is None or u < unit), reverse=True)
        else:
            ahead = sorted(u for u in units if unit is None or u > unit)
        for next_unit in ahead[:LAYERS_GATHERED_AHEAD]:
            for store in self._layer_stores(next_unit):
                store.start()

    def _is_computed(self, bucket: Bucket) -> bool:
        return bool(bucket.layer) and (bucket.goes_back or not self.is_backward)


class ParameterArrival(PassListener):
    """Waits for published parameters before a forward of one stage uses them.

    layers: the units of each chunk that are layers. Listeners are not notified of the units between
    them (entry, exit, the ends of a stack), which are waited for with the preceding layer.
    """

    def __init__(self, stores: Sequence[ParamStore], layers: Sequence[Collection[int]]) -> None:
        self.stores = sorted(stores, key=lambda store: store.shard.bucket.unit)
        self.layers = [sorted(units) for units in layers]
        self.ahead: deque[int] = deque()  # layers that the current forward has not entered
        self.awaited: deque[ParamStore] = deque()  # stores that it still has to wait for

    def begin(self, action: Action) -> None:
        """Wait for the parameters that a forward needs before its first layer."""
        if action.kind != "forward":
            return
        self.awaited = deque(
            store for store in self.stores if store.pending is not None and action.chunk in store.shard.bucket.chunks
        )
        self.ahead = deque(self.layers[action.chunk])
        self._arrive_before_next()

    def enter(self, unit: int) -> None:
        """Wait for the layer's parameters."""
        while self.ahead and self.ahead[0] <= unit:
            self.ahead.popleft()
        self._arrive(unit)

    def leave(self, unit: int) -> None:
        """Wait for the parameters used between this layer and the next."""
        self._arrive_before_next()

    def _arrive_before_next(self) -> None:
        while self.awaited and not (self.ahead and self.awaited[0].shard.bucket.unit >= self.ahead[0]):
            self.awaited.popleft().arrive()

    def _arrive(self, unit: int) -> None:
        while self.awaited and self.awaited[0].shard.bucket.unit <= unit:
            self.awaited.popleft().arrive()
