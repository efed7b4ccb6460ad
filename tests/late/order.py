"""Which use of a memory comes after which, when several streams compute side by side.

Every stream counts its operations, and knows of each other stream how many of them have certainly
passed: those it has waited for, or that a stream it waited for had waited for (vector clocks, as in
torch.cuda._sanitizer, which does not know NCCL's streams). Two uses of one memory of which one
writes must be ordered by that, whatever the real times are; else it is a race. An allocator hands
freed memory out again in the order of the stream that it was taken on: so that stream must know of
all uses when the memory is freed, unless the user is kept in mind (Tensor.record_stream).

The host is a stream too, HOST: what it queues on another comes after all that it has done, and it
knows of a stream what it has waited for. Memory that was taken on it is the host's own: pinned, for
copies from and to the device. The allocator of pinned memory keeps all users in mind.

How much memory a rank takes is counted as the allocators do it (StreamMemory): freed memory can be
taken again on the same stream at once, and memory for which other streams are kept in mind when the
host knows that they have passed. The host here knows nothing that it has not waited for: it is as
far ahead of its device as a host can be.

By hand: stream A writes x (A 1). Stream B waits for A (B knows A 1) and writes x (B 1). A reads x:
it knows nothing of B 1, a race; after A has waited for B it may.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import RLock

WHOLE = (0, 1 << 62)
"""The extent, first byte and end, of whatever lies in a memory."""
HOST = "the host"


class Race(AssertionError):
    """Two uses of one memory in no order, of which one writes."""


@dataclass(frozen=True)
class Use:
    """One use of a memory. time: number of the operation on its stream; extent: bytes from, to;
    words: what it was, for a message."""

    stream: str
    time: int
    words: str
    writes: bool
    extent: tuple[int, int] = WHOLE

    def meets(self, other: Use) -> bool:
        """Whether the two would race if nothing ordered them."""
        (low, high), (first, end) = self.extent, other.extent
        return (self.writes or other.writes) and low < end and first < high


@dataclass
class Memory:
    """One storage. home: the stream that it was taken on; size: its bytes; uses: the latest reads
    and writes of each stream; kept_for: streams that have to come to where they are when it is
    freed before its memory is handed out again."""

    home: str
    size: int = 0
    uses: list[Use] = field(default_factory=list)
    kept_for: set[str] = field(default_factory=set)


@dataclass
class StreamMemory:
    """Bytes that were taken on one stream. held: those in use, and those that wait for other
    streams; waiting: size of a freed memory, and how far which streams have to come; most: the most
    that were held, which the allocator has from the device."""

    held: int = 0
    waiting: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    most: int = 0

    def grow(self, size: int, passed: Mapping[str, int]) -> None:
        """Take so many bytes. passed: what the host knows to have passed."""
        waiting, self.waiting = self.waiting, []
        for one, until in waiting:
            if all(passed.get(stream, 0) >= time for stream, time in until.items()):
                self.held -= one
            else:
                self.waiting.append((one, until))
        self.held += size
        self.most = max(self.most, self.held)

    def shrink(self, size: int, until: dict[str, int]) -> None:
        """Give so many bytes back. until: how far which other streams have to come before."""
        if until:
            self.waiting.append((size, until))
        else:
            self.held -= size


class StreamOrder:
    """The streams of one rank and the memories that they use, by number. amounts: bytes by the
    stream that they were taken on. Threads of the host may call it."""

    def __init__(self) -> None:
        self.clocks: dict[str, dict[str, int]] = {}
        self.memories: dict[int, Memory] = {}
        self.amounts: dict[str, StreamMemory] = {}
        self.lock = RLock()

    def clock(self, stream: str) -> dict[str, int]:
        """How many operations of every stream have passed, as far as `stream` knows."""
        return self.clocks.setdefault(stream, {})

    def advance(self, stream: str) -> int:
        """The number of the stream's next operation."""
        clock = self.clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream]

    def wait(self, stream: str, known: dict[str, int]) -> None:
        """The stream waits for everything in a clock: that of another stream, now or at a time
        when it was copied."""
        with self.lock:
            clock = self.clock(stream)
            for other, time in known.items():
                clock[other] = max(time, clock.get(other, 0))

    def take(self, stream: str, memory: int, words: str, size: int = 0) -> None:
        """A new memory: what it held before was in the order of the stream that takes it."""
        with self.lock:
            self.memories[memory] = Memory(stream, size)
            self._amount(stream).grow(size, self.clock(HOST))
        self.use(stream, memory, words, writes=True)

    def resize(self, memory: int, size: int) -> None:
        """A memory has another size now."""
        with self.lock:
            held = self.memories[memory]
            amount = self._amount(held.home)
            if size < held.size:
                amount.shrink(held.size - size, self._until(held))
            else:
                amount.grow(size - held.size, self.clock(HOST))
            held.size = size

    def _amount(self, stream: str) -> StreamMemory:
        return self.amounts.setdefault(stream, StreamMemory())

    def _until(self, held: Memory) -> dict[str, int]:
        """How far which streams have to come before a memory that is freed is taken again."""
        kept = held.kept_for
        if held.home == HOST:
            kept = {use.stream for use in held.uses if use.stream != HOST}
        return {stream: self.clock(stream).get(stream, 0) for stream in kept}

    def use(self, stream: str, memory: int, words: str, *, writes: bool, extent: tuple[int, int] = WHOLE) -> None:
        """One use of a memory. Raises Race where another use of it is in no order with it."""
        with self.lock:
            held = self.memories.setdefault(memory, Memory(stream))
            use = Use(stream, self.advance(stream), words, writes, extent)
            clock = self.clock(stream)
            for other in held.uses:
                if other.meets(use) and clock.get(other.stream, 0) < other.time:
                    raise Race(
                        f"{words} {_verb(writes)} what {other.words} {_verb(other.writes)}: "
                        f"{stream} does not wait for {other.stream}"
                    )
            held.uses = [other for other in held.uses if not _covers(use, other)] + [use]

    def keep(self, memory: int, stream: str) -> None:
        """The memory is not handed out again before `stream` has passed its uses of it."""
        if memory in self.memories:
            self.memories[memory].kept_for.add(stream)

    def free(self, memory: int) -> str | None:
        """The memory is given back; why that is too early, None where it is not."""
        with self.lock:
            held = self.memories.pop(memory, None)
            if held is None:
                return None
            self._amount(held.home).shrink(held.size, self._until(held))
        if held.home == HOST:
            return None
        clocks = [self.clock(stream) for stream in (held.home, *held.kept_for)]
        for use in held.uses:
            if all(clock.get(use.stream, 0) < use.time for clock in clocks):
                return (
                    f"memory taken on {held.home} is freed while {use.words} {_verb(use.writes)} "
                    f"it: {held.home} does not wait for {use.stream}, nor is it kept for that"
                )
        return None


def _verb(writes: bool) -> str:
    return "writes" if writes else "reads"


def _covers(new: Use, old: Use) -> bool:
    """Whether who is ordered after the new use, and met the old one, is ordered after that too: a
    write of the same bytes was ordered after it, a read of the same stream follows it."""
    is_wider = new.extent[0] <= old.extent[0] and old.extent[1] <= new.extent[1]
    return is_wider and (new.writes or (new.stream == old.stream and not old.writes))
