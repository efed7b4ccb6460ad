"""`mpctl batch`: estimates of the jobs of a file, one answer per line, written while the lines are read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from mpctl.core.errors import InputError

if TYPE_CHECKING:
    from mpctl.plan.batch.answers import Answer
    from mpctl.render.progress import TaskBar

STDIN = "-"
LONG = 2**18  # bytes of a file worth several processes: about 200 lines, half a second


def batch(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file with one JSON object a line; - for stdin.")],
    _: Annotated[bool, typer.Option("--json", hidden=True)] = False,
) -> None:
    """Estimate many jobs: a line of JSON in, a line of JSON out.

    Hundreds a second. A line is a job: {"id": "a", "model": "gpt2", "parallel": {"tp": 2}}. The answer to a bad
    line lists its issues. The exit code is 0 if FILE could be read, whether the jobs fit or not.
    """
    from mpctl.plan.batch.rows import read_lines
    from mpctl.render.progress import PATIENCE, TaskBar

    folder = Path() if file == STDIN else Path(file).parent
    with _opened(file) as (stream, size), TaskBar(after=PATIENCE) as bar:
        on_bytes = _bytes_counter(bar, size) if size and not sys.stdout.isatty() else None
        try:
            for answer in _answers(read_lines(stream, on_bytes), folder, size):
                sys.stdout.write(json.dumps(answer, allow_nan=False) + "\n")
                sys.stdout.flush()
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            raise _unreadable(file, error) from None


def _answers(lines: Iterable[bytes | None], folder: Path, size: int) -> Iterator[Answer]:
    """The answers; for a long file from processes on all cores."""
    if size < LONG:
        from mpctl.plan.batch.answers import answers

        return answers(lines, folder)
    from mpctl.plan.batch.answers import answers_by_processes, process_count

    return answers_by_processes(lines, folder, process_count())


def _bytes_counter(bar: TaskBar, size: int) -> Callable[[int], None]:
    """A callback for the bytes of each line; shows progress in a file of `size` bytes."""
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
    return InputError.of("no-such-file", "FILE", f"{name}: {error.strerror or error}")
