"""The answers of a long batch by several processes, in the order of its lines.

Lines are answered alone, so that blocks of them go to whichever process is free, a few ahead of the
one whose answers are written: memory stays that of some blocks, however long the batch.

By hand, 100 lines are blocks of 32, 32, 32 and 4; on 2 processes all of them are under way at once.
"""

from __future__ import annotations

import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

from mpctl.batch.answers import FIRST_LINES, Answer, Reader, SeenIds
from mpctl.cores import usable_cores

BLOCK = FIRST_LINES  # so that one process has all lines that may be searched
MOST_PROCESSES = 4
AHEAD = 2  # blocks of each process that wait to be written or to be begun
Block = list[tuple[int, bytes | None]]


def process_count() -> int:
    """How many processes answer: one a core, few enough to keep their memory small."""
    return min(MOST_PROCESSES, len(usable_cores()))


def answers_by_processes(
    lines: Iterable[bytes | None], folder: Path, processes: int
) -> Iterator[Answer]:
    """The answers of `mpctl.batch.answers.answers`, found by so many processes."""
    numbered, seen = enumerate(lines, start=1), SeenIds()
    under_way: deque[Future[list[Answer]]] = deque()
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_ignore_signals)
    try:
        while block := list(islice(numbered, BLOCK)):
            under_way.append(pool.submit(_answer_block, block, folder))
            if len(under_way) > AHEAD * processes:
                yield from map(seen.told, under_way.popleft().result())
        while under_way:
            yield from map(seen.told, under_way.popleft().result())
    finally:
        pool.shutdown(cancel_futures=True)


def _ignore_signals() -> None:
    """Ctrl-C ends the process that writes the answers; it ends these."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _answer_block(block: Block, folder: Path) -> list[Answer]:
    reader = Reader(folder)
    return [reader.answer(line, number) for number, line in block]
