"""What the first row of a search costs: regret over published sweeps, and the verdict on memory.

A sweep has several layouts of one model on one number of GPUs (`find_sweeps`). Of those that fit by plan,
`first` is the one that a search puts first, `suggested` the plainest of its ties. Regret is by how much
each ran slower than the fastest of them. Estimates are by constants that had not seen the run: the recorded
residuals of a cross-validation, moved by what the estimate changed since.

By hand, steps of 1.0, 1.1 and 1.2 s of which the search puts the second first: 10 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import exp
from statistics import fmean, median
from typing import NamedTuple

from mpctl.core.errors import InputError
from mpctl.measure.calibrate.runs import Run, read_runs
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.pipeline.stages import UnevenLayersError
from mpctl.plan.estimate.memory import layout_memory, peak_bytes
from mpctl.plan.planning.difference import RANKING_ERROR, WIDE_ERROR
from mpctl.plan.planning.layout_settings import layout_of
from mpctl.plan.search.plain import complexity
from mpctl.plan.search.room import expected_slowdown
from mpctl.spec.runtime import get_profile
from tests.cross_validation import CrossRecord, find_sweeps, read_record
from tests.joint_fit import Residuals, residuals
from tests.published import CROSS_VALIDATED, published_rows, published_runs
from tests.verdicts import JudgedRun, balanced_accuracy

UNTUNED = "nanotron"  # its bands are wide


class SweepRun(NamedTuple):
    """A layout of a sweep: seconds measured and estimated, its place in the order of simplicity, share of
    the device's memory, and whether it fits."""

    measured: float
    estimated: float
    complexity: float
    share: float
    fits: bool

    @property
    def expected(self) -> float:
        """The seconds by which a search orders."""
        return self.estimated * expected_slowdown(self.share)


class Regrets(NamedTuple):
    """Regret of the first and the suggested row of each sweep that has two layouts and more that fit."""

    first: list[float]
    suggested: list[float]

    def cells(self) -> list[str]:
        """How many, then mean and median in percent of each."""
        columns = (self.first, self.suggested)
        return [str(len(self.first)), *(f"{100 * f(c):.1f}" for c in columns for f in (fmean, median))]


def moved(kind: Residuals, record: CrossRecord, today: Residuals) -> Residuals:
    """Residuals left out of a fit, moved by how far today's estimate is from that of the record."""
    return {id: [kind[id][0] + now[0] - record.fitted[id][0]] for id, now in today.items()}


def sweep_runs(runs: Iterable[Run], off: Mapping[str, Sequence[float]]) -> list[SweepRun]:
    """The runs of a sweep. off: log(estimated / measured)."""
    found = []
    for run in runs:
        job, device = run.job, run.job.cluster.device
        assert device is not None, run.id
        need, seconds = peak_bytes(layout_memory(run.layout)), run.measured["step_seconds"]
        plain = complexity(layout_of(job), get_profile(job.training.runtime).plain)
        fits = bool(job.cluster.fits(need))
        found.append(SweepRun(seconds, seconds * exp(off[run.id][0]), plain, need / device.memory_bytes, fits))
    return found


def find_regrets(sweeps: Iterable[Sequence[SweepRun]], error: float) -> Regrets:
    """The regrets over sweeps. error: a share, within which the plainest is suggested."""
    regrets = Regrets([], [])
    for sweep in sweeps:
        fitting = [run for run in sweep if run.fits]
        if len(fitting) > 1:
            best, first = min(run.measured for run in fitting), min(fitting, key=lambda run: run.expected)
            ties = [run for run in fitting if run.expected <= first.expected * (1 + error)]
            suggested = min(ties, key=lambda run: (run.complexity, run.expected))
            regrets.first.append(first.measured / best - 1)
            regrets.suggested.append(suggested.measured / best - 1)
    return regrets


def kept_back() -> Iterator[tuple[str, str, Regrets]]:
    """(sweeps, what was left out of the fit, regrets)."""
    record = read_record(CROSS_VALIDATED)
    sweeps = list(find_sweeps(published_runs()).values())
    today = residuals([run for sweep in sweeps for run in sweep], {})
    for kind in ("fifths", "tables", "clusters"):
        off = moved(getattr(record, kind), record, today)
        for name, error in ((UNTUNED, WIDE_ERROR), ("others", RANKING_ERROR)):
            own = [sweep_runs(s, off) for s in sweeps if (s[0].group == UNTUNED) == (name == UNTUNED)]
            yield name, kind, find_regrets(own, error)


def unknown_trainer(**settings: object) -> Iterator[tuple[str, Regrets]]:
    """The regrets of the same sweeps as those of a trainer that no profile knows, by table.

    settings: of `[training]`, over those of the rows.
    """
    runs = []
    for row in published_rows():
        if "step_seconds" in row["measured"]:
            training = {**row["job"]["training"], "runtime": "other", **settings}
            try:
                runs += read_runs([{**row, "job": {**row["job"], "training": training}}])
            except (InputError, UnevenLayersError):
                continue  # a layout or type that it does not run
    sweeps = list(find_sweeps(runs).values())
    for table in dict.fromkeys(sweep[0].group for sweep in sweeps):
        own = [sweep for sweep in sweeps if sweep[0].group == table]
        off = residuals([run for sweep in own for run in sweep], {})
        yield table, find_regrets((sweep_runs(sweep, off) for sweep in own), WIDE_ERROR)


def as_unknown(runs: Iterable[JudgedRun], **settings: object) -> Iterator[JudgedRun]:
    """The same runs judged as those of a trainer that no profile knows."""
    for run in runs:
        job = run.job
        training = job.training.model_copy(update={"runtime": "other", **settings})
        job = job.model_copy(update={"training": training})
        try:
            memory = layout_memory(JobLayout.of(job))
        except UnevenLayersError:
            continue
        yield replace(run, job=job, need=peak_bytes(memory), first_bytes=memory[0].reserved_bytes)


def verdict_cells(runs: Sequence[JudgedRun], headroom: float) -> list[str]:
    """Runs, the share that ran and fits, that failed and does not, balanced accuracy."""
    ran, failed = [r for r in runs if r.ran], [r for r in runs if not r.ran and r.has_cause]
    return [
        str(len(ran) + len(failed)),
        f"{fmean(r.fits(headroom) for r in ran):.3f}",
        f"{fmean(not r.fits(headroom) for r in failed):.3f}",
        f"{balanced_accuracy(runs, headroom):.3f}",
    ]
