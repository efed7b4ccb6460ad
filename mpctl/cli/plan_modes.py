"""Modes of `mpctl plan` besides showing one plan, a function each.

--batch estimates the jobs of a file, one answer per line, written while the lines are read;
--compare, --explain and --compare-tensor-modes print a document of their own; --from reads a job
from another launcher's flags, and --emit writes the plan in them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from mpctl.cli.options import JobSource
from mpctl.core.errors import InputError

if TYPE_CHECKING:
    from mpctl.plan.batch.answers import Answer
    from mpctl.plan.planning.plan import Plan
    from mpctl.render.progress import TaskBar

STDIN = "-"
LONG = 2**18  # bytes of a file worth several processes: about 200 lines, half a second


def compare(job: JobSource, more: list[str], *, as_json: bool) -> None:
    """Print JOB next to other jobs, or to itself with other settings."""
    from mpctl.plan.planning.compare import compare_document, load_variants
    from mpctl.render.output import print_json

    jobs = [*([job.source] if job.source else []), *more]
    document = compare_document(load_variants(jobs, job.overrides))
    if as_json:
        print_json(document)
        return
    from mpctl.render.compare import print_comparison

    print_comparison(document)


def explain(job: JobSource, wanted: list[str], *, as_json: bool) -> None:
    """Print figures with their formulas and numbers."""
    from mpctl.plan.planning.explain import explain as explained
    from mpctl.plan.planning.explain import explain_document
    from mpctl.plan.planning.summary import training_settings
    from mpctl.render.output import print_json

    job, wanted = job.with_first_word(wanted)
    plan = job.plan()
    figures, training = explained(plan, wanted), training_settings(plan.job)
    if as_json:
        print_json(explain_document(figures, training))
        return
    from mpctl.render.plan import print_figures

    print_figures(figures, training)


def compare_tensor_modes(job: JobSource, more: list[str], *, as_json: bool) -> None:
    """Print the costs of the tensor modes for sizes of tp, in symbols and with JOB's numbers."""
    from mpctl.plan.planning.tensor_modes import tensor_modes_document
    from mpctl.render.output import print_json

    if wrong := [word for word in more if not word.isdecimal() or int(word) < 1]:
        raise InputError.of(
            "bad-tp",
            "--compare-tensor-modes",
            f"{wrong[0]!r} is no size of tp",
            "for example: demo --compare-tensor-modes 4 8",
        )
    document = tensor_modes_document(job.source, job.overrides, [int(word) for word in more])
    if as_json:
        print_json(document)
        return
    from mpctl.render.compare import print_tensor_modes

    print_tensor_modes(document)


def read_from(job: JobSource, launcher: str, text: str) -> JobSource:
    """The job of another launcher's flags, overridden by the settings of the command line."""
    from mpctl.interop.command_line import read_flags

    return job.read_from(*read_flags(launcher, text, job.overrides))


def for_launcher(job: JobSource, target: str, *, is_read: bool) -> JobSource:
    """The job under the runtime of launcher `target`, if the user named none. is_read: the job's
    runtime comes from another launcher's flags, so the user did not name it."""
    from mpctl.interop.emitted import launcher_runtime
    from mpctl.spec.load import load_partial

    loaded = load_partial(job.source, job.overrides).job
    if loaded is None or not (is_read or loaded.training.is_runtime_default):
        return job
    return job.with_settings({"training.runtime": launcher_runtime(loaded, target)})


def print_emitted(made: Plan, target: str, *, as_json: bool) -> None:
    """Print a plan in the form of another launcher."""
    from mpctl.interop.emitted import emit_plan
    from mpctl.render.output import print_json

    emitted = emit_plan(made, target)
    if as_json:
        print_json(emitted.as_dict())
    else:
        print(emitted.text)


def run_batch(job: JobSource, name: str, words: list[str]) -> None:
    """Answer every line of a file, or of stdin. Raises InputError when it cannot be read, and when
    the command line also has a job or other words."""
    from mpctl.plan.batch.rows import read_lines
    from mpctl.render.progress import PATIENCE, TaskBar

    if job.source or job.overrides or words:
        raise InputError.of(
            "usage", "--batch", "takes jobs from its file alone", "leave JOB and the flags of a job out"
        )
    folder = Path() if name == STDIN else Path(name).parent
    with _opened(name) as (stream, size), TaskBar(after=PATIENCE) as bar:
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
    return InputError.of("no-such-file", "--batch", f"{name}: {error.strerror or error}")
