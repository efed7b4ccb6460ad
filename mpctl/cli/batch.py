"""`mpctl plan --batch FILE`: one answer a line, written while the lines are read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from mpctl.errors import InputError

if TYPE_CHECKING:
    from mpctl.batch.answers import Answer
    from mpctl.render.progress import TaskBar

STDIN = "-"
LONG = 2**18  # bytes of a file that pay for several processes: some 200 lines, half a second


def run_batch(name: str) -> None:
    """Answer every line of a file, or of stdin. Raises InputError when it cannot be read."""
    from mpctl.batch.rows import read_lines
    from mpctl.render.progress import TaskBar

    folder = Path() if name == STDIN else Path(name).parent
    with _opened(name) as (stream, size), TaskBar(after=1.0) as bar:
        on_bytes = _bytes_counter(bar, size) if size and not sys.stdout.isatty() else None
        try:
            for answer in _answers(read_lines(stream, on_bytes), folder, size):
                sys.stdout.write(json.dumps(answer, allow_nan=False) + "\n")
                sys.stdout.flush()
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            raise _unreadable(name, error) from None


def _answers(lines: Iterable[bytes | None], folder: Path, size: int) -> Iterator[Answer]:
    """The answers, of a file that is long by all cores."""
    if size < LONG:
        from mpctl.batch.answers import answers

        return answers(lines, folder)
    from mpctl.batch.answers import answers_by_processes, process_count

    return answers_by_processes(lines, folder, process_count())


def _bytes_counter(bar: TaskBar, size: int) -> Callable[[int], None]:
    """Shows on the bar how much of a file of `size` bytes was read; called with each line's."""
    done = 0

    def count(length: int) -> None:
        nonlocal done
        done += length
        bar.update("lines", done, size)

    return count


@contextmanager
def _opened(name: str) -> Iterator[tuple[BinaryIO, int]]:
    """The stream of the lines, and its size in bytes, 0 when that is not known."""
    if name == STDIN:
        yield sys.stdin.buffer, 0
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(Path(name).open("rb"))
        except OSError as error:
            raise _unreadable(name, error) from None
        yield file, os.fstat(file.fileno()).st_size


def _unreadable(name: str, error: OSError) -> InputError:
    return InputError.of("no-such-file", "--batch", f"{name}: {error.strerror or error}")
