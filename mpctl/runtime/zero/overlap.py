"""When a bucket's gradients are reduced: as soon as they are complete, while backward goes on.

ZeRO 0 and 1 reduce once a step, in the last backward that adds to a bucket; 2 and 3 in every one.
Within it a bucket starts when backward reaches a unit before its first; the rest at its end.
Gradients that are put off (kernels/deferred_wgrad.py) come in an action of their own, one after the
other, and their buckets start there. What is under way is waited for after the schedule; at 2 and 3
all but the last one, to bound the gradients that are held whole.

By hand, 1f1b of m micro batches on one stage, ZeRO 0: all start in the backward of m - 1, none
before; ZeRO 2: each of m backwards starts all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from torch import Tensor

from mpctl.kernels.deferred_wgrad import later_of
from mpctl.pipeline.schedule.orders import Action
from mpctl.runtime.pass_listener import PassListener
from mpctl.runtime.zero.gradients import BucketGradients
from mpctl.transport.group import Pending

MAX_IN_FLIGHT = 1  # of those that are whole for a moment, besides the one that fills


class GradientOverlap(PassListener):
    """each: reduce in every backward; early: as soon as complete, else when all are."""

    def __init__(
        self,
        stores: Iterable[BucketGradients],
        actions: Iterable[Action],
        *,
        each: bool,
        early: bool,
    ) -> None:
        self.stores, self.each, self.early = list(stores), each, early
        self.put_off = [{p for p in s.block.parameters if later_of(p)} for s in self.stores]
        self.last: dict[int, Action] = {}
        for action in actions:
            self.last |= dict.fromkeys(self._added_to(action), action)
        self.before_sum: Callable[[BucketGradients], None] = lambda store: None
        self.left: set[int] = set()
        self.due: list[int] = []
        self.missing: list[set[Tensor]] = []
        self.under_way: deque[tuple[BucketGradients, Pending]] = deque()
        for parameter in set[Tensor]().union(*self.put_off):
            parameter.register_post_accumulate_grad_hook(self._arrived)  # after the store's own

    def _added_to(self, action: Action) -> list[int]:
        """Stores that an action completes: where something is put off, that is the later one."""
        if action.kind == "forward":
            return []
        is_later = action.kind == "backward_weight"
        return [
            i for i, store in enumerate(self.stores)
            if action.chunk in store.block.bucket.chunks and bool(self.put_off[i]) == is_later
        ]  # fmt: skip

    def restart(self) -> None:
        """Before a step."""
        self.left = set(range(len(self.stores)))

    def begin(self, action: Action) -> None:
        found = self._added_to(action)
        if not self.each:
            found = [i for i in found if self.early and self.last[i] == action]
        self.due = found
        self.missing = [set(parameters) for parameters in self.put_off]

    def back(self, unit: int) -> None:
        if self.early:
            self._start([i for i in self.due if self.stores[i].block.bucket.unit > unit])

    def _arrived(self, parameter: Tensor) -> None:
        """In an action of put off gradients, in one order on all replicas."""
        for i in self.due:
            self.missing[i].discard(parameter)
        while self.early and self.due and self._is_there(self.due[0]):
            self._start(self.due[:1])

    def _is_there(self, number: int) -> bool:
        return bool(self.put_off[number]) and not self.missing[number]

    def end(self, action: Action) -> None:
        self._start(list(self.due))
        if self.each and not self.early:
            self._land(0)

    def finish(self) -> None:
        """After the schedule: all gradients are summed over the replicas."""
        if not self.each:
            self._start(sorted(self.left))
        self._land(0)

    def _start(self, numbers: list[int]) -> None:
        for i in numbers:
            self.before_sum(self.stores[i])
            self.under_way.append((self.stores[i], self.stores[i].start()))
            self.left.discard(i)
            if self.each:
                self._land(MAX_IN_FLIGHT)
        self.due = [i for i in self.due if i not in numbers]

    def _land(self, most: int) -> None:
        while len(self.under_way) > most:
            store, pending = self.under_way.popleft()
            store.land(pending.wait())
