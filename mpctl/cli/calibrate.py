"""`mpctl calibrate`: fit the figures of a system to its measured runs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpctl.cli.options import AsJsonOption
from mpctl.core.errors import InputError, Issue

if TYPE_CHECKING:
    from mpctl.interop.log_rows import LogLayout

RunsOption = Annotated[
    list[Path],
    typer.Argument(
        help="Run directories, folders of a bench that contain runs, logs of other launchers or "
        "folders of them, or JSON lists of runs, each with a job (including cluster.preset and "
        "training.runtime) and its measured step, or a log."
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        help="Preset of the cluster of the run directories and logs, by name or file; by default "
        "the one with the cluster's name, or that of a log's job.",
        show_default=False,
    ),
]
JobOption = Annotated[
    str | None, typer.Option(help="Layout of the logs: a job file, or a job preset's name.", show_default=False)
]
FromOption = Annotated[
    tuple[str, str] | None,
    typer.Option(
        "--from",
        metavar='LAUNCHER "FLAGS"',
        help="Layout of the logs: another launcher's command line, as of `mpctl plan --from` "
        "(@FILE: a file with it). By default what a log prints of its settings.",
        show_default=False,
    ),
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the logs' jobs; repeatable.")
]
LauncherOption = Annotated[
    str | None,
    typer.Option(
        help="Whose lines the logs have: a launcher, as of `mpctl plan --emit`, or trainer for progress "
        "bars (accelerate, transformers, Lightning); by default found in each.",
        show_default=False,
    ),
]
OutOption = Annotated[
    Path,
    typer.Option(
        help="Folder to write the fitted presets to, as KIND/NAME.toml. Later commands in this directory read "
        "./presets; any other folder only where MPCTL_PRESETS names it."
    ),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Fit to the runs even if they lie outside the 90 % band of their plans.")
]


def calibrate(
    runs: RunsOption,
    out: OutOption,
    cluster: ClusterOption = None,
    job: JobOption = None,
    from_: FromOption = None,
    set_: SetOption = None,
    launcher: LauncherOption = None,
    force: ForceOption = False,
    as_json: AsJsonOption = False,
) -> None:
    """Fit the figures of your system to measured steps.

    Figures of the cluster, its device and the runtime start from their presets: a few runs move
    what they can tell, above all the factor on everything; more runs move more. The fitted presets
    are copies, with a band from the errors on runs left out. A run that cannot be planned, and a log
    that cannot be read, is reported with the reason and left out.

    Exit codes: 0 presets were written; 2 bad input, or more than one run in ten lies outside the 90 %
    band of its plan, which a fault explains better than new figures (--force: fit anyway).
    """
    from mpctl.core.errors import capped
    from mpctl.measure.calibrate.outside import outside_issues, outside_runs, require_inside
    from mpctl.measure.calibrate.own import fit_own, own_presets
    from mpctl.measure.calibrate.own_words import WrittenPresets, own_document
    from mpctl.measure.calibrate.runs import usable_runs
    from mpctl.render.calibrate import print_own_fit
    from mpctl.render.output import print_json, print_warnings
    from mpctl.spec.presets import preset_reader, require_not_bundled

    rows, unread = _rows(runs, _log_layout(job, from_, set_, cluster, launcher))
    measured, unusable = usable_runs(rows, unread)
    unusable = [*unread, *unusable]
    print_warnings([f"not fitted to: {issue}" for issue in capped(unusable)])
    require_not_bundled(out)
    outside = outside_runs(measured)
    if not force:
        require_inside(measured, outside)
    print_warnings(list(map(str, capped(outside_issues(outside)))))
    fit = fit_own(measured)
    print_warnings(fit.doubts)
    written = WrittenPresets(out, own_presets(fit, out), preset_reader(out))
    if as_json:
        print_json(own_document(fit, written, unusable, outside))
    else:
        print_own_fit(fit, written)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _log_layout(
    job: str | None, from_: tuple[str, str] | None, set_: list[str] | None, cluster: str | None, launcher: str | None
) -> LogLayout:
    """Settings of the logs' layout, from the options."""
    from mpctl.interop.log_rows import LogLayout
    from mpctl.spec.load import parse_settings

    if job and from_:
        raise InputError.of("usage", "--job", f"{job!r} is given together with --from", "leave one of them out")
    return LogLayout(job, from_, parse_settings(set_ or ()), cluster, launcher)


def _rows(paths: list[Path], layout: LogLayout) -> tuple[list[dict[str, Any]], list[Issue]]:
    """The rows of all lists, run directories and logs, and the issues of what gave no row."""
    from mpctl.interop.log_rows import folder_logs, is_log_folder, log_rows, logs_of_rows
    from mpctl.measure.calibrate.runs import find_runs, is_run_path, run_rows

    folders = [path for path in paths if is_log_folder(path) and not any(find_runs(path))]
    runs = [path for path in paths if is_run_path(path) and path not in folders]
    lists = [path for path in paths if path not in (*folders, *runs) and _is_list(path)]
    logs = [(path, layout) for path in paths if path not in (*folders, *runs, *lists)]
    rows: list[dict[str, Any]] = []
    issues: list[Issue] = []
    for path in lists:
        listed = _listed(path)
        is_log = [isinstance(row, dict) and "log" in row for row in listed]
        rows += [row for row, log in zip(listed, is_log, strict=True) if not log]
        of_logs = [row for row, log in zip(listed, is_log, strict=True) if log]
        logs += logs_of_rows(of_logs, path.parent, layout, issues)
    logs += [log for folder in folders for log in folder_logs(folder, layout)]
    read = log_rows(logs)
    for note in read.notes:
        _say(note)
    own, without_step = run_rows(runs, layout.cluster)
    return rows + own + read.rows, issues + without_step + read.issues


def _is_list(path: Path) -> bool:
    """Whether a file is a list of runs, by its name or by how it begins, rather than a log."""
    if path.suffix == ".json":
        return True
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return re.match(r"\s*(\[\s*\{|\{\s*\")", file.read(64)) is not None
    except OSError:
        return False


def _listed(path: Path) -> list[Any]:
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


RUNS = "give a JSON list of runs, a log with its layout, or a run directory"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError.of("bad-runs", str(path), str(error), RUNS) from None
