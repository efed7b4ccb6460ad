"""ZeRO 1 and 2: stepped parameters are gathered while the next forward already computes.

After an update each replica has its slice of every bucket, and the others' are gathered
(param_store.py: publish), in the order in which forward needs them. A forward waits for a bucket
where it enters the first unit that the bucket has parameters of; what reads parameters between two
steps, a checkpoint or a change of values, waits in the store itself.

Ranks that exchange messages through shared memory copy them by themselves, so that nothing goes on
while they compute; there a bucket waited for in the middle of a forward would only keep two ranks
in step. They wait at once.

By hand, buckets of units 0, 2 and 4 (entry 0, layers 1 to 3, exit 4): the first is waited for where
a forward begins, the second at layer 2, the third after layer 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from mpctl.pipeline.schedule.orders import Action
from mpctl.runtime.pass_listener import PassListener
from mpctl.runtime.zero.param_store import ParamStore


class ParameterArrival(PassListener):
    """Waits for published parameters before a forward of one stage uses them.

    layers: of each chunk, the units that are layers; what lies between them (entry, exit, the ends
    of a stack) is not told of, and is waited for with the layer before.
    """

    def __init__(self, stores: Sequence[ParamStore], layers: Sequence[Collection[int]]) -> None:
        self.stores = sorted(stores, key=lambda store: store.shard.bucket.unit)
        self.layers = [sorted(units) for units in layers]
        self.ahead: deque[int] = deque()  # layers that the forward under way has not entered
        self.awaited: deque[ParamStore] = deque()  # what it still has to wait for

    def begin(self, action: Action) -> None:
        """Wait for what a forward needs before its first layer."""
        if action.kind != "forward":
            return
        self.awaited = deque(
            store
            for store in self.stores
            if store.is_under_way and action.chunk in store.shard.bucket.chunks
        )
        self.ahead = deque(self.layers[action.chunk])
        self._arrive_before_next()

    def enter(self, unit: int) -> None:
        """Wait for the layer's own parameters."""
        while self.ahead and self.ahead[0] <= unit:
            self.ahead.popleft()
        self._arrive(unit)

    def leave(self, unit: int) -> None:
        """Wait for what is used between this layer and the next."""
        self._arrive_before_next()

    def _arrive_before_next(self) -> None:
        while self.awaited and not (
            self.ahead and self.awaited[0].shard.bucket.unit >= self.ahead[0]
        ):
            self.awaited.popleft().arrive()

    def _arrive(self, unit: int) -> None:
        while self.awaited and self.awaited[0].shard.bucket.unit <= unit:
            self.awaited.popleft().arrive()
