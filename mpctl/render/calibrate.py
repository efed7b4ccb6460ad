"""A fit as a table: the error of each group of runs before, after, and if left out of the fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import expm1
from pathlib import Path
from shlex import quote

from mpctl.core.units import plural
from mpctl.measure.calibrate.own_fit import OwnFit
from mpctl.measure.calibrate.own_words import WrittenPresets, band_text
from mpctl.measure.calibrate.runs import Run
from mpctl.render.parts import Lines, Part, Sentence, table_of
from mpctl.render.terminal import print_parts
from mpctl.spec.presets import PresetReader

NOTE = "Mean absolute error of the step time, before the fit and after it; bias: the mean error after it, with its sign"


READERS: dict[PresetReader, str] = {
    "directory": "every later mpctl command in this directory reads",
    "user": "every later mpctl command of this user reads",
    "variable": "every mpctl command under this MPCTL_PRESETS reads",
}


def print_own_fit(fit: OwnFit, written: WrittenPresets) -> None:
    """Print errors, the band, what was learnt and which run would tell most."""
    print_parts(own_fit_parts(fit, written))


def own_fit_parts(fit: OwnFit, written: WrittenPresets) -> Iterator[Part]:
    """The errors of each group of runs before the fit, after it, and left out of it; then the rest."""
    columns, rows = {"before": fit.before, "fitted": fit.fitted, "left out": fit.left_out}, []
    for group in dict.fromkeys(run.group for run in fit.runs):
        run_ids = [run.id for run in fit.runs if run.group == group]
        residuals = {name: [error for run in run_ids for error in column[run]] for name, column in columns.items()}
        bias = expm1(sum(residuals["fitted"]) / len(residuals["fitted"]))
        errors = map(_error, residuals.values())
        rows.append((group or "all", str(len(run_ids)), *errors, f"{100 * bias:+.1f} %"))
    yield table_of("", ("group", "runs", *columns, "bias"), rows, left=("group",))
    yield Sentence(NOTE, "note")
    yield Sentence("left out: runs predicted by a fit that did not see them", "note")
    yield Sentence(f"{plural(len(written.paths), 'preset')} written to {written.folder}")
    if written.reader:
        names = ", ".join(f"{path.parent.name}/{path.stem}" for path in written.paths)
        yield Sentence(f"{READERS[written.reader]} {names} from there; move the folder to plan without", "warning")
    for name, spread in fit.spreads.items():
        yield Sentence(f"{name}: nine of ten runs to come are within {band_text(spread)} of their plan")
    yield Lines("Fitted", fit.learnt)
    yield Lines("The most informative runs", fit.telling)
    variable = "" if written.reader else f"MPCTL_PRESETS={quote(str(written.folder))} "
    systems = dict.fromkeys(map(_names, fit.runs))
    lines = [f"{variable}mpctl search JOB --cluster {c} --runtime {runtime}" for c, runtime in systems]
    yield Lines("Plan under the fitted presets, by their names", lines, are_commands=True)


def _names(run: Run) -> tuple[str, str]:
    """The names of the fitted copies of a run's cluster and runtime, for a shell."""
    cluster, runtime = (quote(Path(run.parts[kind]).stem) for kind in ("clusters", "runtimes"))
    return cluster, runtime


def _error(values: Sequence[float]) -> str:
    return f"{100 * sum(abs(expm1(value)) for value in values) / len(values):.1f} %"
