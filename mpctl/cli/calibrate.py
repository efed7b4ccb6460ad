"""`mpctl calibrate`: fit the constants of the time model to measured runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

RunsOption = Annotated[
    list[Path],
    typer.Argument(
        help="Run directories, folders of a bench that contain runs, or JSON lists of runs, each "
        "with a job (including cluster.preset and training.runtime) and its measured step."
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        help="Preset of the cluster of the run directories, by name or file; by default the one "
        "with the cluster's name.",
        show_default=False,
    ),
]
OutOption = Annotated[
    Path, typer.Option(help="Folder to write the fitted presets to, as KIND/NAME.toml.")
]
PriorsOption = Annotated[
    Path | None,
    typer.Option(help="JSON: start values of constants by name, instead of those in presets."),
]
CrossOption = Annotated[
    bool,
    typer.Option(
        help="Also cross-validate, by fitting again without parts of the runs; takes minutes."
    ),
]
ProcessesOption = Annotated[
    int | None,
    typer.Option(min=1, help="Processes that estimate runs; by default up to one per core."),
]


def calibrate(
    runs: RunsOption,
    out: OutOption,
    cluster: ClusterOption = None,
    priors: PriorsOption = None,
    rounds: Annotated[int, typer.Option(min=1, help="Iterations of the fit.")] = 10,
    cross: CrossOption = False,
    processes: ProcessesOption = None,
) -> None:
    """Fit the constants of devices, clusters and runtime profiles to measured steps.

    Constants start from the values in their presets: a few runs move them a little, many runs
    determine them. The fitted presets are copies: with --out presets, commands here find them by
    name. A run that cannot be planned is reported with the reason and left out.
    """
    from mpctl.calibrate.evaluate import open_evaluator
    from mpctl.calibrate.fit import Fit, leave_out, residuals
    from mpctl.calibrate.runs import constants_of, usable_runs
    from mpctl.calibrate.write import write_presets
    from mpctl.errors import capped
    from mpctl.render.calibrate import print_fit
    from mpctl.render.output import print_warnings

    prior_values, (measured, left_out_runs) = _priors(priors), usable_runs(_rows(runs, cluster))
    print_warnings([f"not fitted to: {issue}" for issue in capped(left_out_runs)])
    constants = constants_of(measured)
    with open_evaluator(measured, constants, processes) as evaluate:
        fit = Fit(measured, constants, evaluate, prior_values)
        fitted = fit.solve(rounds=rounds, say=_say)
        left_out = leave_out(fit, fitted, say=_say) if cross else None
    values = fit.values(fitted.shift)
    paths = write_presets(measured, values, out, left_out)
    errors = {"before": residuals(measured, {}), "fitted": residuals(measured, values)}
    if left_out:
        errors |= {"a fifth left out": left_out.fifths, "group left out": left_out.tables}
    print_fit(measured, errors, paths)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _priors(path: Path | None) -> dict[str, float]:
    from mpctl.errors import InputError

    values = _read(path) if path else {}
    is_table = isinstance(values, dict) and all(type(v) in (int, float) for v in values.values())
    if not is_table or any(value <= 0 for value in values.values()):
        raise InputError.of("bad-priors", str(path), "no table of constants and their values")
    return dict(values)


def _rows(paths: list[Path], cluster: str | None) -> list[dict[str, Any]]:
    """The rows of all lists, and those of all run directories."""
    from mpctl.calibrate.runs import is_run_path, run_rows

    runs = [path for path in paths if is_run_path(path)]
    lists = [path for path in paths if path not in runs]
    return [row for path in lists for row in _listed(path)] + run_rows(runs, cluster)


def _listed(path: Path) -> list[dict[str, Any]]:
    from mpctl.errors import InputError

    document = _read(path)
    rows = document.get("rows") if isinstance(document, dict) else document
    if not isinstance(rows, list) or not rows:
        raise InputError.of("bad-runs", str(path), "no rows", "a list, or a table with `rows`")
    return [_with_paths(row, path.parent) for row in rows]


def _with_paths(row: Any, folder: Path) -> Any:
    """The row; paths of presets in its job are relative to the file of runs, in `folder`."""
    from mpctl.spec.paths import with_preset_files_of

    if not isinstance(row, dict) or not isinstance(row.get("job"), dict):
        return row
    return {**row, "job": with_preset_files_of(row["job"], folder)}


def _read(path: Path) -> Any:
    from mpctl.errors import InputError

    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError.of("bad-runs", str(path), str(error)) from None
