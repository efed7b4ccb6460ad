"""Writing fitted constants as presets: copies of the files with other numbers.

Comments, order and sources stay as they are; only values in lines `key = value` are replaced. A
runtime profile also gets the spread of the residuals and a description of its runs (`seen`), and
every file gets a first line that says to which runs its constants were fitted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mpctl.calibrate.cross import Residuals, spread
from mpctl.calibrate.runs import PASSES, Constant, Kind, Run
from mpctl.errors import InputError
from mpctl.spec.presets import get_file

DIGITS = 4
FITTED = "# Fitted by `mpctl calibrate` to "
LEAST_SPREAD = 0.035  # less cannot be told from few runs
APART = 1.5  # times as much, over tables left out
Changes = dict[str, str | float]


def written(text: str, changes: Mapping[str, str | float]) -> str:
    """The text of a preset with these values at their dotted paths.

    The path `operators.passes` multiplies all passes over memory by its value.

    >>> written("[host]\\nlayer = 1  # a\\n", {"host.layer": 2.0})
    '[host]\\nlayer = 2  # a\\n'
    """
    lines, table = text.split("\n"), ""
    for at, line in enumerate(lines):
        if found := re.match(r"\[([\w.]+)\]", line):
            table = found[1] + "."
        key = table + line.split(" = ")[0]
        if key in changes:
            lines[at] = _replaced(line, changes[key])
        elif "operators.passes" in changes and key in PASSES:
            lines[at] = _scaled(line, float(changes["operators.passes"]))
    return "\n".join(lines)


def _replaced(line: str, value: str | float) -> str:
    shown = value if isinstance(value, str) else number(value)
    return re.sub(r"= (\[.*\]|\"[^\"]*\"|\S+)", lambda _: f"= {shown}", line, count=1)


def _scaled(line: str, factor: float) -> str:
    return re.sub(r"(?<== )[\d.]+", lambda found: number(float(found[0]) * factor), line)


def number(value: float) -> str:
    """A number as it is written in presets, with four significant digits."""
    return f"{value:.{DIGITS}g}"


def write_presets(
    runs: Sequence[Run], values: Mapping[Constant, float], near: Residuals, apart: Residuals,
    directory: Path,
) -> list[Path]:  # fmt: skip
    """Write DIRECTORY/KIND/NAME.toml for each preset with a fitted constant; returns the paths.

    near, apart: residuals of cross-validation by folds and by tables (cross.py). A runtime profile
    without any keeps the spreads that it has.
    """
    changes: dict[tuple[Kind, str], Changes] = {}
    for constant, value in values.items():
        for name in constant.names:
            changes.setdefault((constant.kind, name), {})[constant.path] = value
    _require_apart(changes)
    for (kind, name), own in changes.items():
        if kind == "runtimes":
            own |= _profile([run for run in runs if run.parts[kind] == name], near, apart)
    return [
        _write(directory, kind, name, own, [run for run in runs if run.parts[kind] == name])
        for (kind, name), own in sorted(changes.items())
    ]


def _require_apart(presets: Iterable[tuple[Kind, str]]) -> None:
    """Raises InputError where two presets, named by their files, would be written to one file."""
    written_as: dict[tuple[Kind, str], str] = {}
    for kind, name in presets:
        first = written_as.setdefault((kind, get_file(kind, name, where=kind).name), name)
        if first != name:
            message = f"{first} and {name} would be written to one file"
            raise InputError.of("same-name", kind, message, "rename one of them")


def _profile(runs: Sequence[Run], near: Residuals, apart: Residuals) -> Changes:
    """What changes in a runtime profile besides constants, by dotted path.

    These are the devices, clusters, dtypes and sizes of its runs, added to those that it names, and
    the spreads of the residuals of runs left out of the fit.
    """
    seen = runs[0].profile.seen
    devices = [r.job.cluster.device.name for r in runs if r.job.cluster.device]
    found: Changes = {
        "seen.devices": _listed([*seen.devices, *devices]),
        "seen.clusters": _listed([*seen.clusters, *(r.job.cluster.name or "" for r in runs)]),
        "seen.dtypes": _listed([*seen.dtypes, *(r.job.training.dtype for r in runs)]),
        "seen.gpus": str(max(seen.gpus, *(run.job.world_size for run in runs))),
        "seen.parameters": float(max(seen.parameters, *(run.layout.table.numel for run in runs))),
    }
    for key, residuals, least in (
        ("spread", near, LEAST_SPREAD), ("spread_apart", apart, APART * LEAST_SPREAD)
    ):  # fmt: skip
        left_out = [value for run in runs for value in residuals.get(run.id, ())]
        if left_out:
            found[key] = max(spread(left_out), least)
    return found


def _listed(names: Iterable[str]) -> str:
    return json.dumps(sorted(set(names)))


def _write(directory: Path, kind: Kind, name: str, changes: Changes, runs: Sequence[Run]) -> Path:
    file = get_file(kind, name, where=kind)
    text = file.content().decode("utf-8")
    text = "\n".join(line for line in text.split("\n") if not line.startswith(FITTED))
    groups = ", ".join(dict.fromkeys(run.group for run in runs if run.group))
    told = f"{len(runs)} runs" + (f" ({groups})" if groups else "")
    path = directory / kind / f"{file.name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    line = f"{FITTED}{told}\n" if runs else f"{FITTED}runs of its sibling\n"
    path.write_text(line + written(text, changes), "utf-8")
    return path
