"""Writing fitted constants as presets: copies of the files with other numbers.

Comments, order and sources stay unchanged; only values in lines `key = value` are replaced. A
runtime profile also gets its spread and a description of its runs (`seen`), and every file a first
line that names the runs of the fit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mpctl.core.errors import InputError
from mpctl.core.units import plural
from mpctl.measure.calibrate.runs import PASSES, Kind, Run
from mpctl.spec.paths import is_path
from mpctl.spec.presets import PresetFile, get_file
from mpctl.spec.runtime import FittedRuns

DIGITS = 4
FITTED = "# Fitted by `mpctl calibrate` to "
Changes = dict[str, str | float]


def written(text: str, changes: Mapping[str, str | float]) -> str:
    """The text of a preset with these values at their dotted paths.

    The path `operators.passes` multiplies all passes over memory by its value. A key that the
    preset leaves at its default is added at the beginning of its table.

    >>> written("[host]\\nlayer = 1  # a\\n", {"host.layer": 2.0, "host.step": 3.0})
    '[host]\\nstep = 3\\nlayer = 2  # a\\n'
    """
    lines, table = text.split("\n"), ""
    missing = dict.fromkeys(changes)
    for at, line in enumerate(lines):
        if found := re.match(r"\[([\w.]+)\]", line):
            table = found[1] + "."
        key = table + line.split(" = ")[0]
        if key in changes:
            lines[at] = _replaced(line, changes[key])
            missing.pop(key, None)
        elif "operators.passes" in changes and key in PASSES:
            lines[at] = _scaled(line, float(changes["operators.passes"]))
            missing.pop("operators.passes", None)
        elif " = {" in line:
            inner = {
                path.removeprefix(key + "."): value for path, value in changes.items() if path.startswith(key + ".")
            }
            lines[at] = _inside(line, inner)
            for path in inner:
                if re.search(rf"\b{re.escape(path)} = ", line):
                    missing.pop(f"{key}.{path}", None)
    for key in missing:
        _add(lines, key, changes[key])
    return "\n".join(lines)


def _add(lines: list[str], key: str, value: str | float) -> None:
    """Add a line for a key to its table, which may be written under its header, in braces or by
    dotted keys, and is added at the end where there is none."""
    table, _, name = key.rpartition(".")
    line = f"{name} = {_shown(value)}"
    heads = next((n for n, old in enumerate(lines) if re.match(r"\s*\[", old)), len(lines))
    short = [n for n, old in enumerate(lines[:heads]) if table and old.startswith(f"{table}.")]
    braces = [n for n, old in enumerate(lines[:heads]) if old.startswith(f"{table} = {{")]
    if not table:
        lines.insert(next((n for n, old in enumerate(lines) if " = " in old), 0) + 1, line)
    elif short:
        lines.insert(short[0], f"{table}.{line}")
    elif table and braces:
        lines[braces[0]] = lines[braces[0]].replace("{", f"{{ {line},", 1)
    elif (header := f"[{table}]") in lines:
        lines.insert(lines.index(header) + 1, line)
    else:
        lines += [header, line, ""]


def _inside(line: str, changes: Mapping[str, str | float]) -> str:
    """A line whose value is a table in braces, with the values of its keys changed."""

    def changed(found: re.Match[str]) -> str:
        value = changes.get(found[1])
        return found[0] if value is None else f"{found[1]} = {number(float(value))}"

    return re.sub(r"(\w+) = ([\d.e+-]+)", changed, line)


def _replaced(line: str, value: str | float) -> str:
    shown = _shown(value)
    return re.sub(r"= (\{.*\}|\[.*\]|\"[^\"]*\"|\S+)", lambda _: f"= {shown}", line, count=1)


def _shown(value: str | float) -> str:
    return value if isinstance(value, str) else number(value)


def _scaled(line: str, factor: float) -> str:
    return re.sub(r"(?<== )[\d.]+", lambda found: number(float(found[0]) * factor), line)


def number(value: float) -> str:
    """A number as it is written in presets, with four significant digits."""
    return f"{value:.{DIGITS}g}"


def write_changed(runs: Sequence[Run], changes: Mapping[tuple[Kind, str], Changes], directory: Path) -> list[Path]:
    """Write DIRECTORY/KIND/NAME.toml for each preset with these changes; returns the paths. Raises
    InputError where two presets, named by their files, would be written to one file."""
    _require_apart(changes)
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


def merged_seen(known: FittedRuns, seen: FittedRuns) -> FittedRuns:
    """Runs of both."""
    return FittedRuns(
        devices=[*known.devices, *seen.devices],
        clusters=[*known.clusters, *seen.clusters],
        links={**known.links, **seen.links},
        step_factors={**known.step_factors, **seen.step_factors},
        layer_factors={**known.layer_factors, **seen.layer_factors},
        dtypes=[*known.dtypes, *seen.dtypes],
        gpus=max(known.gpus, seen.gpus),
        parameters=max(known.parameters, seen.parameters),
    )


def seen_changes(seen: FittedRuns) -> Changes:
    """The lines of a profile's table `seen`, by dotted path."""
    factors = {"seen.step_factors": _numbers(seen.step_factors)}
    layers = {n: _numbers(found) for n, found in seen.layer_factors.items() if found}
    return {
        **(factors if seen.step_factors else {}),
        **({"seen.layer_factors": _table(layers)} if layers else {}),
        "seen.devices": _listed(seen.devices),
        "seen.clusters": _listed(seen.clusters),
        "seen.links": _table({n: f"[{', '.join(map(number, found))}]" for n, found in seen.links.items()}),
        "seen.dtypes": _listed(seen.dtypes),
        "seen.gpus": str(seen.gpus),
        "seen.parameters": float(seen.parameters),
    }


def _listed(names: Iterable[str]) -> str:
    return json.dumps(sorted(set(names)))


def _numbers(values: Mapping[str, float]) -> str:
    return _table({name: number(value) for name, value in values.items()})


def _table(values: Mapping[str, str]) -> str:
    """An inline table of these values, by name."""
    pairs = (f"{json.dumps(name)} = {values[name]}" for name in sorted(values))
    return f"{{ {', '.join(pairs)} }}"


def _moved(file: PresetFile, runs: Sequence[Run]) -> Changes:
    """The presets that a cluster's file names by path, as its copy in another folder has to: the
    one it starts from where it lies, the device's fitted copy beside its own."""
    if file.kind != "clusters":
        return {}
    base = file.read().get("preset")
    found: Changes = {}
    if isinstance(base, str) and is_path(base):
        found["preset"] = json.dumps(str(Path(base).resolve()))
    devices = {run.parts["devices"] for run in runs}
    if runs and is_path(device := devices.pop()):
        found["device"] = json.dumps(f"../devices/{Path(device).stem}.toml")
    return found


def _write(directory: Path, kind: Kind, name: str, changes: Changes, runs: Sequence[Run]) -> Path:
    file = get_file(kind, name, where=kind)
    changes = {**changes, **_moved(file, runs)}
    text = file.content().decode("utf-8")
    text = "\n".join(line for line in text.split("\n") if not line.startswith(FITTED))
    groups = ", ".join(dict.fromkeys(run.group for run in runs if run.group))
    what = plural(len(runs), "run") + (f" ({groups})" if groups else "")
    path = directory / kind / f"{file.name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    line = f"{FITTED}{what}\n" if runs else f"{FITTED}runs of its sibling\n"
    path.write_text(line + written(text, changes), "utf-8")
    return path
