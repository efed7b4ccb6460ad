"""Reading lines that programs append to files, with an amount of work that does not depend on them.

The launcher looks at them twenty times a second between its other duties: hangs, stops, the status.
A program may print 100 MB in a second, or a line that never ends. So a file is read in pieces of
PIECE_BYTES, one of each file in turn, and `read_in_turn` stops after a number of bytes, of seconds
or of finds; the next call goes on from there. Of a line longer than a piece the beginning counts. A
carriage return ends a line as a newline does, as progress bars write it. Nothing is written: the
files stay as they are.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

PIECE_BYTES = 1 << 14
Found = TypeVar("Found")


@dataclass
class ForeignLines(Generic[Found]):
    """The lines of a file from its present end on.

    parse: what a line says, None for nothing. may_say: whether any line of a block of bytes may say
    something, a test that is much cheaper than parse. offset: bytes read so far; is_cut: whether
    they end inside a line whose beginning was parsed, or was skipped; delivered: finds so far.
    """

    path: Path
    parse: Callable[[bytes], Found | None]
    may_say: Callable[[bytes], bool] = lambda block: True
    offset: int = 0
    is_cut: bool = False
    delivered: int = 0

    def __post_init__(self) -> None:
        self.offset = self.path.stat().st_size if self.path.exists() else 0

    def pieces(self, on_find: Callable[[Found], object]) -> Generator[int, None, None]:
        """Read a piece at each `next` and call on_find with what its lines say; yields the bytes.
        Ends where no further line is complete. A file that was removed or cut is read from its
        start; one that cannot be read now is left for the next time."""
        try:
            with self.path.open("rb", buffering=0) as stream:
                if os.fstat(stream.fileno()).st_size < self.offset:
                    self.offset, self.is_cut = 0, False
                while piece := os.pread(stream.fileno(), PIECE_BYTES, self.offset):
                    end = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
                    if not end and len(piece) < PIECE_BYTES and not self.is_cut:
                        return
                    block = piece[:end] or piece
                    self.offset += len(block)
                    self._parse(block, has_end=end > 0, on_find=on_find)
                    yield len(block)
        except OSError:
            return

    def _parse(self, block: bytes, *, has_end: bool, on_find: Callable[[Found], object]) -> None:
        lines: Sequence[bytes] = ()
        if self.may_say(block):
            lines = block.replace(b"\r", b"\n").split(b"\n")[self.is_cut :]
        self.is_cut = not has_end
        for line in lines:
            if line and self.may_say(line) and (found := self.parse(line)) is not None:
                self.delivered += 1
                on_find(found)

    def skip(self, but: int) -> int:
        """Go to the last `but` bytes of the file; returns how many bytes are left out for it."""
        try:
            size = self.path.stat().st_size
        except OSError:
            return 0
        left_out = max(0, size - but - self.offset)
        if left_out:
            self.offset, self.is_cut = self.offset + left_out, True
        return left_out


def read_in_turn(
    files: Sequence[ForeignLines[Found]],
    on_find: Callable[[Found], object],
    *,
    most_bytes: int,
    most_finds: int,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Read new lines of these files, a piece of each in turn and at least one of each, until there
    are none, or until so many bytes, finds or seconds are reached; returns whether there may be
    more."""
    deadline, before = clock() + seconds, sum(file.delivered for file in files)
    turns = deque(file.pieces(on_find) for file in files)
    read = turn = 0
    while turns:
        finds = sum(file.delivered for file in files) - before
        is_spent = read >= most_bytes or finds >= most_finds or clock() >= deadline
        if turn >= len(files) and is_spent:
            break
        turn += 1
        pieces = turns.popleft()
        if size := next(pieces, 0):
            read += size
            turns.append(pieces)
    for pieces in turns:
        pieces.close()
    return bool(turns)
