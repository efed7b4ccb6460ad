"""What steps need, read by a thread while the steps before are computed.

The items of a step are a function of its number, so a reader can go on to the next step by itself.
A step that is not the next one, such as one that is computed once more, is read anew from there. An
error belongs to its item: it is raised where that item is asked for, not before.

By hand, steps of 2 items and a depth of 3: while item 0 of step 0 is used, item 1 of step 0 and
both of step 1 are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class _Failure:
    """An error that reading raised, in the place of the item."""

    error: BaseException


@dataclass(frozen=True)
class _End:
    """The step has no more items."""


class ReadAhead(Generic[Item]):
    """Reads the items of steps `0 .. stop` in a thread of its own, which the first use starts.

    read: the items of a step, by its number; only the thread calls it. depth: how many items are
    read before they are asked for.
    """

    def __init__(self, read: Callable[[int], Iterator[Item]], *, stop: int, depth: int) -> None:
        self.read, self.stop, self.depth = read, stop, depth
        self.next_step: int | None = None  # whose items the thread gives next
        self._items: deque[Item | _Failure | _End] = deque()
        self._changed, self._is_closed = Condition(), False
        self._thread: Thread | None = None

    def step(self, number: int) -> Iterator[Item]:
        """The items of step `number`; waits for those that are not read yet. Raises what reading
        them raised."""
        if number != self.next_step:
            self._start(number)
        self.next_step = None  # until this step is over
        while not isinstance(item := self._take(), _End):
            if isinstance(item, _Failure):
                self.close()
                raise item.error
            yield item
        self.next_step = number + 1 if number + 1 < self.stop else None

    def close(self) -> None:
        """End the thread, after the item that it is reading."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._thread, self.next_step = None, None

    def _start(self, number: int) -> None:
        self.close()
        self._items.clear()
        self._is_closed = False
        self._thread = Thread(target=self._run, args=(number,), name="reading", daemon=True)
        self._thread.start()

    def _run(self, first: int) -> None:
        try:
            for number in range(first, max(self.stop, first + 1)):
                for item in self.read(number):
                    if not self._put(item):
                        return
                self._put(_End())
        except BaseException as error:
            self._put(_Failure(error))

    def _put(self, item: Item | _Failure | _End) -> bool:
        """Hand over an item, once there is room; whether more are wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._items) < self.depth)
            self._items.append(item)
            self._changed.notify_all()
            return not self._is_closed

    def _take(self) -> Item | _Failure | _End:
        with self._changed:
            self._changed.wait_for(lambda: self._items)
            item = self._items.popleft()
            self._changed.notify_all()
            return item
