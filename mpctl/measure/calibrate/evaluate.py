"""The residuals of many runs under given constants, by several processes.

A fit asks for the residuals of all its runs a few dozen times, and for their slopes by each
constant a few times. The runs are dealt out in turn over the processes once; then only values of
constants go out, and residuals come back. A process builds its runs from their jobs, so that it can
be spawned rather than forked.

5 runs on 2 processes: the first has runs 0, 2 and 4. A run with 3 constants is estimated
4 times for its slopes, once for its residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import exp
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import NamedTuple

from mpctl.core.cores import core_count
from mpctl.core.errors import InputError
from mpctl.measure.calibrate.runs import Constant, Kind, Run
from mpctl.model.layout.job_layout import JobLayout
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import RuntimeProfile

STEP = 0.02  # of a derivative, in the logarithm
WORTH = 20_000  # estimates of a fit that pay for one more process: some ten seconds
Values = Mapping[Constant, float]
OwnConstants = Sequence[Sequence[Constant]]  # those that each run depends on
_RunParts = tuple[str, str, JobSpec, RuntimeProfile, Mapping[Kind, str], Mapping[str, float]]


class RunEvaluation(NamedTuple):
    """residuals: log(estimated / measured) of a run, one or two. slopes: of each of its constants,
    the change of each residual over that of the constant's logarithm; empty unless asked for."""

    residuals: list[float]
    slopes: list[list[float]]


# The evaluations of some runs, by number: of (values, numbers of runs, whether with slopes).
Evaluate = Callable[[Values, Collection[int], bool], dict[int, RunEvaluation]]


def evaluate_run(run: Run, own: Sequence[Constant], values: Values, with_slopes: bool) -> RunEvaluation:
    """A run's residuals and slopes. own: the constants that it depends on."""
    here = {c: values[c] for c in own}
    found = run.residuals(here)
    slopes = []
    for c in own if with_slopes else ():
        step = STEP if here[c] * exp(STEP) <= c.most else -STEP
        moved = run.residuals({**here, c: here[c] * exp(step)})
        slopes.append([(a - b) / step for a, b in zip(moved, found, strict=True)])
    return RunEvaluation(found, slopes)


@contextmanager
def open_evaluator(
    runs: Sequence[Run], constants: Sequence[Constant], processes: int | None = None
) -> Iterator[Evaluate]:
    """A function that evaluates these runs, in the caller's process or in several.

    processes: as many as there are cores, or fewer where the runs are few, when None.
    """
    own = own_constants(runs, constants)
    count = processes or _processes(own)
    if count == 1:
        yield _evaluate_here(dict(enumerate(runs)), own)
        return
    with ExitStack() as stack:
        workers = [stack.enter_context(_worker(runs, own, at, count)) for at in range(count)]
        yield _evaluate_there(workers)


def own_constants(runs: Sequence[Run], constants: Sequence[Constant]) -> list[list[Constant]]:
    return [[c for c in constants if run.has(c)] for run in runs]


def _processes(own: OwnConstants) -> int:
    estimates = 10 * sum(map(len, own))
    return max(1, min(core_count(), estimates // WORTH))


def _evaluate_here(runs: Mapping[int, Run], own: OwnConstants) -> Evaluate:
    def evaluate(values: Values, which: Collection[int], slopes: bool) -> dict[int, RunEvaluation]:
        return {at: evaluate_run(runs[at], own[at], values, slopes) for at in which}

    return evaluate


def _evaluate_there(workers: Sequence[Connection]) -> Evaluate:
    def evaluate(values: Values, which: Collection[int], slopes: bool) -> dict[int, RunEvaluation]:
        for number, worker in enumerate(workers):
            share = [at for at in which if at % len(workers) == number]
            worker.send((values, share, slopes))
        found: dict[int, RunEvaluation] = {}
        for worker in workers:
            answer = worker.recv()
            if isinstance(answer, tuple):
                raise InputError(answer)
            found |= answer
        return found

    return evaluate


@contextmanager
def _worker(runs: Sequence[Run], own: OwnConstants, at: int, count: int) -> Iterator[Connection]:
    """A connection to a process that has every count-th run from number `at` on."""
    spawn = get_context("spawn")
    here, there = spawn.Pipe()
    share = {number: _sent(runs[number]) for number in range(at, len(runs), count)}
    process = spawn.Process(target=_serve, args=(there, share, own), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join()


def _sent(run: Run) -> _RunParts:
    """The parts from which a run is built: its layout is large, and determined by its job."""
    return run.id, run.group, run.job, run.profile, run.parts, run.measured


def _received(parts: _RunParts) -> Run:
    name, group, job, profile, presets, measured = parts
    return Run(name, group, JobLayout.of(job), profile, presets, measured)


def _serve(connection: Connection, share: Mapping[int, _RunParts], own: OwnConstants) -> None:
    evaluate = _evaluate_here({at: _received(parts) for at, parts in share.items()}, own)
    while True:
        try:
            values, which, slopes = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            connection.send(evaluate(values, which, slopes))
        except InputError as error:
            connection.send(error.issues)
