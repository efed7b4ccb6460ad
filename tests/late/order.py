"""Which use of a memory comes after which, when several streams compute side by side.

Every stream counts its operations, and knows of each other stream how many of them have certainly
passed: those it has waited for, or that a stream it waited for had waited for (vector clocks, as in
torch.cuda._sanitizer, which does not know NCCL's streams). Two uses of one memory of which one
writes must be ordered by that, whatever the real times are; else it is a race. An allocator hands
freed memory out again in the order of the stream that it was taken on: so that stream must know of
all uses when the memory is freed, unless the user is kept in mind (Tensor.record_stream).

By hand: stream A writes x (A 1). Stream B waits for A (B knows A 1) and writes x (B 1). A reads x:
it knows nothing of B 1, a race; after A has waited for B it may.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WHOLE = (0, 1 << 62)
"""The extent, first byte and end, of whatever lies in a memory."""


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
    """One storage. home: the stream that it was taken on; uses: the latest reads and writes of each
    stream; kept_for: streams that have to come to where they are when it is freed before its memory
    is handed out again."""

    home: str
    uses: list[Use] = field(default_factory=list)
    kept_for: set[str] = field(default_factory=set)


class StreamOrder:
    """The streams of one rank and the memories that they use, by number."""

    def __init__(self) -> None:
        self.clocks: dict[str, dict[str, int]] = {}
        self.memories: dict[int, Memory] = {}

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
        clock = self.clock(stream)
        for other, time in known.items():
            clock[other] = max(time, clock.get(other, 0))

    def take(self, stream: str, memory: int, words: str) -> None:
        """A new memory: what it held before was in the order of the stream that takes it."""
        self.memories[memory] = Memory(stream)
        self.use(stream, memory, words, writes=True)

    def use(
        self, stream: str, memory: int, words: str, *, writes: bool, extent: tuple[int, int] = WHOLE
    ) -> None:
        """One use of a memory. Raises Race where another use of it is in no order with it."""
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
        held = self.memories.pop(memory, None)
        if held is None:
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
