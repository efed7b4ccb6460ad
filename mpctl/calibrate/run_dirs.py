"""Run directories as measured runs: what `mpctl launch` and the benches wrote, as it lies.

A path is a run directory, a file in one, or a folder somewhere below which runs lie, such as that
of a bench. A run is the job of its job.json and the median step time of its metrics.jsonl after the
warm-up, as its summary.json has it; where only the summary was kept, that one's. The job.json holds
the figures of a cluster and not the name of its preset: a fit needs the preset, which is that with
the cluster's name unless one is given. Of the run's own cluster the number of nodes, of devices and
the headroom stay.

By hand, RUN with steps of 9, 8, 2.0, 2.2 and 2.1 s on the cluster that presets/clusters/ours.toml
names: {"id": "RUN", "job": {"cluster": {"preset": "ours", ...}, ...},
"measured": {"step_seconds": 2.1}}.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from mpctl.errors import InputError, Issue, attempt
from mpctl.rundir.directory import RunDir
from mpctl.rundir.summary import training_progress
from mpctl.spec.load import read_source
from mpctl.spec.presets import find_preset, lasting_name, preset_names, search_path

Row = dict[str, Any]
RUN_FILES = ("job.json", "metrics.jsonl", "summary.json")
OWN = ("nodes", "gpus_per_node", "headroom")  # of a run's cluster, whatever its preset says
DEEPEST = 3  # folders below a path in which runs are looked for


def is_run_path(path: Path) -> bool:
    """Whether a path is a folder, or a file of a run directory, rather than a list of runs."""
    return path.is_dir() or path.name in RUN_FILES


def run_rows(paths: Iterable[Path], cluster: str | None = None) -> list[Row]:
    """The runs at these paths, as rows that `read_runs` takes, each run once.

    cluster: the preset of all runs, by name or path. Raises InputError with the issues of all paths
    where one holds no run, a run has no step, or no preset has its cluster's name.
    """
    rows: list[Row] = []
    issues: list[Issue] = []
    folders: dict[Path, None] = {}
    for path in paths:
        found = list(find_runs(path))
        folders.update(dict.fromkeys(found))
        if not found:
            issues.append(Issue("bad-runs", str(path), "no run directory lies there",
                                "name the folder of a run, or of a bench that ran it"))  # fmt: skip
    for folder in folders:
        row = attempt(issues, partial(_row, folder, cluster))
        if row is not None:
            rows.append(row)
    if issues:
        raise InputError(issues)
    return rows


def find_runs(path: Path) -> Iterator[Path]:
    """The run directories at or below a path, sorted by name, without those of ranks that measured
    kernels or collectives and trained nothing."""
    folder = path.parent if path.name in RUN_FILES else path
    yield from _runs_below(folder, DEEPEST)


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "job.json").is_file():
        if not RunDir(folder).bench.exists():
            yield folder
    elif depth and folder.is_dir():
        for inner in sorted(folder.iterdir()):
            if inner.is_dir() and not inner.is_symlink():
                yield from _runs_below(inner, depth - 1)


def _row(folder: Path, cluster: str | None) -> Row:
    run = RunDir(folder)
    raw = read_source(str(run.job))
    own = raw.get("cluster")
    own = own if isinstance(own, dict) else {}
    preset = cluster or preset_of_cluster(own, where=str(run.job))
    kept = {key: own[key] for key in OWN if own.get(key) is not None}
    return {
        "id": str(folder),
        "group": folder.resolve().parent.name,
        "job": {**raw, "cluster": {**kept, "preset": lasting_name("clusters", preset)}},
        "measured": {"step_seconds": measured_step(run)},
    }


def measured_step(run: RunDir) -> float:
    """Seconds of a step of the run, the median after the warm-up. Raises InputError where no step
    of it was recorded."""
    seconds = training_progress(list(run.records()))["step_seconds"] or _summary_step(run)
    if not seconds:
        raise InputError.of("no-steps", str(run.path), "no step of the run was recorded",
                            "leave it out, or run it again")  # fmt: skip
    return seconds


def _summary_step(run: RunDir) -> float | None:
    try:
        seconds = json.loads(run.summary.read_text("utf-8"))["step_seconds"]
        return float(seconds) if seconds is not None and float(seconds) > 0 else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def preset_of_cluster(cluster: Mapping[str, Any], *, where: str) -> str:
    """The name of the preset with this cluster's name. Raises InputError, at `where`, where there
    is none."""
    if isinstance(preset := cluster.get("preset"), str):
        return preset
    named = _presets_by_title(search_path())
    if (title := str(cluster.get("name"))) in named:
        return named[title]
    told = f"is called {title!r}" if cluster.get("name") else "is meant: its cluster has no name"
    hint = "name the preset that the runs were made on: --cluster NAME or FILE"
    raise InputError.of("unknown-cluster", where, f"no cluster preset {told}", hint)


@cache
def _presets_by_title(search_path: tuple[str, ...]) -> Mapping[str, str]:
    """Names of cluster presets by the `name` in them, read once for each place of presets."""
    tables = {name: find_preset("clusters", name) or {} for name in preset_names("clusters")}
    return {str(table["name"]): name for name, table in tables.items() if "name" in table}
