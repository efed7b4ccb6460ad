"""From a file or preset, flags and `--set` to one resolved JobSpec, or to every issue at once.

Order, later wins: the job preset that a file starts from (`preset = "demo"`), the file, flags and
`--set`. In each layer a table may be a preset's name (`model = "gpt2"`) or start from one
(`[model] preset = "gpt2"`, `layers = 4`); the preset is applied first and single keys override it,
in whatever order they were typed. A file's path may replace a preset's name anywhere (presets.py).
Paths in a file are relative to the file (paths.py). A key under a former name is read as the new
one (names.py).

The law of layers (`resolve`): a table's base is the one that it names (`preset`, or `hf_config` for
a model), else the table in the layer below; its own keys override the base's, key by key, at any
depth. So `cluster.device.memory_bytes = 1` above `cluster = "selene"` keeps all of selene, and of
its A100 all but the memory. Where a model table gets a base, values that only follow from the
base's shape (`derived_values` in model.py) are derived again.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from pydantic import ValidationError

from mpctl.core.errors import InputError, Issue
from mpctl.spec.base import StrictModel
from mpctl.spec.chat import with_prepared_chat
from mpctl.spec.cluster import ClusterSpec, DeviceSpec
from mpctl.spec.job import JobSpec, complete, open_settings_of
from mpctl.spec.model import ModelSpec, with_positions, without_derived
from mpctl.spec.names import (
    DEEPEST,
    full_name,
    full_names,
    require_table,
    with_all_new_names,
    with_full_names,
    with_new_names,
    without,
)
from mpctl.spec.paths import anchored, is_config, is_hub_id, is_path, with_preset_files_of
from mpctl.spec.presets import (
    HUB_IDS,
    PRESET_TABLES,
    Kind,
    PresetFile,
    bundled_names,
    find_file,
    get_file,
    nearest_presets,
    places_text,
    require_valid,
)
from mpctl.spec.releases import find_release

Raw = dict[str, Any]
Where = tuple[str, ...]
Source = str | PathLike[str] | Mapping[str, Any] | None
"""A job: the path of its file, a preset's name, or its tables, `{"model": {"preset": "gpt2"}}`."""
MODEL = ("model",)
LONGEST_TRAIL = 16  # presets that start from each other
MODELS: dict[Where, type[StrictModel]] = {
    (): JobSpec,
    ("cluster",): ClusterSpec,
    ("cluster", "device"): DeviceSpec,
    MODEL: ModelSpec,
}
STDIN = "-"
RUN_JOB = "job.json"
"""The name of the job in a run directory, which a launch writes."""


@dataclass(frozen=True)
class LoadedJob:
    """The part of a job that could be read, with its issues.

    job: without the keys that were refused, None where nothing remains; issues: every error;
    tables_with_errors: those where a default stands for a value that was refused; open_settings:
    those that were left open and follow from the others; warnings: keys under a former name, a runtime
    named by its release; presets: the
    user's presets that the job starts from.
    """

    job: JobSpec | None
    issues: tuple[Issue, ...] = ()
    tables_with_errors: frozenset[str] = frozenset()
    open_settings: frozenset[str] = frozenset()
    warnings: tuple[Issue, ...] = ()
    presets: tuple[PresetFile, ...] = ()


def load_job(source: Source, overrides: Mapping[str, Any] | None = None) -> JobSpec:
    """Resolve a job. source: a path, a preset's name, tables as a file holds them, or None for an empty job.

    overrides: settings by full or short name, `{"parallel.tp": 2, "model": "gpt2"}`.
    Raises InputError carrying all issues.
    """
    return require_job(load_partial(source, overrides))


def load_partial(source: Source, overrides: Mapping[str, Any] | None = None) -> LoadedJob:
    """Load a job as load_job does, but return the issues with the part of the job that could be read."""
    return partial_from_raw(_raw(source), {} if overrides is None else overrides)


def _raw(source: Source) -> Raw:
    if source is None:
        return {}
    if isinstance(source, str | PathLike):
        return read_source(os.fspath(source))
    return with_full_names(_plain(source, "JOB"))


def _plain(value: Any, where: str) -> Any:
    """Tables and lists as JSON has them. Raises InputError where a key is no text."""
    if isinstance(value, Mapping) or where == "JOB":
        require_table(value, where)
        return {key: _plain(inner, key) for key, inner in value.items()}
    return [_plain(inner, where) for inner in value] if isinstance(value, list | tuple) else value


def job_from_raw(raw: Raw, overrides: Mapping[str, Any]) -> JobSpec:
    """The job of raw tables, as a file holds them; raises InputError carrying all issues."""
    return require_job(partial_from_raw(raw, overrides))


def load_as_written(source: str | None, overrides: Mapping[str, Any]) -> JobSpec:
    """The job with every preset and config that it names read into it, and nothing filled in.

    Its set fields are a job of their own for another machine. Paths of data stay as the file has
    them. Raises InputError carrying all issues.
    """
    notes = Notes.new()
    raw = {} if source is None else read_source(source, anchor=with_preset_files_of)
    raw = _merged(raw, overrides, notes)
    if notes.issues:
        raise InputError(notes.issues)
    return parse(raw)


def _merged(raw: Raw, overrides: Mapping[str, Any], notes: Notes) -> Raw:
    """The tables of a file with those of its presets below them and the overrides above."""
    overrides = full_names(overrides)
    raw = resolve({}, with_full_names(raw), notes)
    for where, value in overrides.items():
        if isinstance(value, dict):  # a complete table replaces the one below
            raw = without(raw, where.split("."))
            notes.forget(tuple(where.split(".")))
    merged: Raw = resolve(raw, nested(overrides), notes)
    if isinstance(data := merged.get("data"), dict):
        try:
            merged["data"] = with_prepared_chat(data)
        except InputError as error:
            notes.issues.extend(error.issues)
    return _with_runtime(merged, notes)


def _with_runtime(raw: Raw, notes: Notes) -> Raw:
    """The tables with the runtime preset that was fitted to the release that they name, if they name one."""
    training = raw.get("training")
    text = training.get("runtime") if isinstance(training, dict) else None
    if not isinstance(text, str) or text in bundled_names("runtimes"):
        return raw
    try:
        release = find_release(text)
    except InputError as error:
        notes.issues.extend(error.issues)
        return without(raw, ["training", "runtime"])
    if release is None:
        return raw
    cluster = raw.get("cluster")
    device = cluster.get("device") if isinstance(cluster, dict) else None
    rates = device.get("peak_flops") if isinstance(device, dict) else None
    preset = release.preset_for(rates if isinstance(rates, dict) else None)
    notes.warnings.append(release.warning(preset))
    return {**raw, "training": {**raw["training"], "runtime": preset}}


def partial_from_raw(raw: Raw, overrides: Mapping[str, Any]) -> LoadedJob:
    """Read a job as job_from_raw does, but return the issues with the part of the job that could be read."""
    notes = Notes.new()
    raw = _merged(raw, overrides, notes)
    issues = list(notes.issues)
    refused = {issue.where.split(".")[0] for issue in issues}
    job: JobSpec | None
    try:
        job = parse(raw)
    except SchemaError as error:
        issues += error.issues
        refused |= {str(path[0]) for kind, path in error.locations if kind != "extra_forbidden"}
        job = _without_refused(raw, error)
    warnings = tuple(notes.warnings)
    if job is None:
        return LoadedJob(None, tuple(issues), frozenset(refused), warnings=warnings)
    open_settings = open_settings_of(job)
    own = notes.own_presets()
    return LoadedJob(complete(job), tuple(issues), frozenset(refused), open_settings, warnings, own)


def require_job(loaded: LoadedJob) -> JobSpec:
    """The loaded job; raises InputError carrying all issues if there are any."""
    if loaded.issues or loaded.job is None:
        raise InputError(loaded.issues)
    return loaded.job


class SchemaError(InputError):
    """An error of the schema. locations: pydantic's type of each error, with its key's path."""

    def __init__(self, error: ValidationError) -> None:
        from mpctl.spec.issues import joined_details, key_path, schema_issues

        details = joined_details(error)
        super().__init__(schema_issues(details))
        self.locations = [(detail["type"], key_path(detail)) for detail in details]


def parse(raw: Raw) -> JobSpec:
    """The strict model of a fully expanded job; raises InputError."""
    try:
        return JobSpec.model_validate(raw)
    except ValidationError as error:
        raise SchemaError(error) from None


def _without_refused(raw: Raw, error: SchemaError) -> JobSpec | None:
    """The job without the refused keys, so that rules can check the rest; None where a required key
    is missing."""
    for kind, path in error.locations:
        # A table that lacks a required key is left out completely.
        raw = without(raw, path[:1] if kind == "missing" else path)
    try:
        return parse(raw)
    except SchemaError as again:  # a refused key was one that its table requires
        if any(kind != "missing" for kind, _ in again.locations):
            return None
        return _without_refused(raw, again)


def nested(overrides: Mapping[str, Any]) -> Raw:
    """`{"model.layers": 4, "model": "gpt2"}` -> `{"model": {"preset": "gpt2", "layers": 4}}`."""
    tree: Raw = {}
    for where, value in sorted(overrides.items(), key=lambda item: item[0].count(".")):
        *path, last = where.split(".")
        table = tree
        for key in path:
            inner = table.get(key)
            if isinstance(inner, str):
                inner = {"preset": inner}
            table[key] = dict(inner) if isinstance(inner, dict) else {}
            table = table[key]
        table[last] = value
    return tree


def read_source(source: str, *, anchor: Callable[[Raw, Path], Raw] = anchored) -> Raw:
    """The raw tables of a job file (TOML, or the job.json of a run), of a job preset, or for `-` of
    the standard input. anchor: joins relative paths to the folder of a file (paths.py)."""
    path = Path(source)
    if source == STDIN or path.suffix in (".toml", ".json") or is_file(path):
        return anchor(with_full_names(_read_file(path)), path.parent)
    file = find_file("jobs", source)
    if file is None:
        raise InputError.of("no-such-job", "JOB", f"{source!r} is neither a file nor a job preset", _job_hint(source))
    return read_job_preset(file)


def _job_hint(source: str) -> str:
    """Return a hint: the flag for the name of a model's or cluster's preset; else the nearest job
    presets, and the folders that were searched."""
    flags: dict[Kind, str] = {"models": "--model", "clusters": "--cluster"}
    for kind, flag in flags.items():
        is_name = not is_path(source) or is_hub_id(source)
        if is_name and find_file(kind, source) is not None:
            return f"it is a preset of {kind}: use {flag} {source}"
    return f"presets: {nearest_presets('jobs', source)}; {places_text('jobs')}"


def is_file(path: Path) -> bool:
    """Return whether a path is an existing file."""
    try:
        return path.is_file()
    except OSError:  # a name too long for a file is not one
        return False


@cache
def _read_once(stream: TextIO) -> str:
    """The text of a stream that a command may load its job from more than once."""
    return stream.read()


def _read_file(path: Path) -> Raw:
    try:
        text = _read_once(sys.stdin) if str(path) == STDIN else path.read_text("utf-8")
        is_json = path.suffix == ".json" or (str(path) == STDIN and text.lstrip()[:1] == "{")
        raw = json.loads(text) if is_json else tomllib.loads(text)
    except OSError as error:
        raise InputError.of("no-such-file", str(path), error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:  # bad TOML, bad JSON and bad UTF-8 alike
        hint = _syntax_hint(str(error), text) if isinstance(error, tomllib.TOMLDecodeError) else ""
        raise InputError.of("bad-syntax", str(path), str(error), hint) from None
    if not isinstance(raw, dict):
        raise InputError.of("bad-syntax", str(path), "a job is a table of tables")
    if not raw:
        hint = "write a model, a cluster or sizes in it; `mpctl init FILE` makes a commented one"
        raise InputError.of("empty-job", str(path), "the file holds no setting", hint)
    # No warnings for a job.json: an older version wrote it, and nobody should have to rewrite it.
    return with_all_new_names(raw) if path.name == RUN_JOB else raw


def _syntax_hint(message: str, text: str) -> str:
    """Return a hint for a launch script, and for a table that has the name of a key: `cluster = "x"` and
    `[cluster]`."""
    if text.startswith("#!") or re.search(r"^\s*(?:torchrun|srun|deepspeed|accelerate launch) ", text, re.MULTILINE):
        return "a launch script is read by its launcher's name: --from megatron @FILE"
    found = re.match(r"Cannot overwrite a value \(at line (\d+)", message)
    line = text.splitlines()[int(found[1]) - 1].strip() if found else ""
    table = re.match(r"\[\s*([\w-]+)\s*\]", line)
    if table is None:
        return ""
    name = table[1]
    hint = f"{name} is a name and a table: leave out `{name} = NAME`"
    return f"{hint}, write `preset = NAME` in [{name}]"


UNSET = "null"
"""A setting without a value, in a command line: TOML has no word for it."""


def parse_settings(settings: Iterable[str], option: str = "--set") -> Raw:
    """`["tp=2", "model=gpt2"]` -> `{"parallel.tp": 2, "model": "gpt2"}`.

    A setting is named in full or by its key alone (names.py). A value is read as TOML, or as a
    string where it is not valid TOML; `null`, None, removes what the job's file sets. Raises InputError
    for all that are no KEY=VALUE, as values of `option`.
    """
    parsed: Raw = {}
    issues: list[Issue] = []
    for setting in settings:
        where, equals, text = setting.partition("=")
        if not equals or not where:
            message = f"{setting!r} is not KEY=VALUE"
            issues.append(Issue("bad-set", option, message, f"for example {option} tp=2"))
            continue
        name = full_name(where.strip())
        if text.strip() == UNSET:
            parsed[name] = None
            continue
        try:
            parsed[name] = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            parsed[name] = text
    if issues:
        raise InputError(issues)
    return parsed


class Base(NamedTuple):
    """The table that another starts from; file: the preset's, None for a config.json's shape."""

    table: Raw
    file: PresetFile | None = None


class Notes(NamedTuple):
    """Findings while tables are merged: errors, warnings about old names, and the user's presets that each
    table starts from."""

    issues: list[Issue]
    warnings: list[Issue]
    presets: dict[Where, list[PresetFile]]

    @classmethod
    def new(cls) -> Notes:
        """Return notes without findings."""
        return cls([], [], {})

    def own_presets(self) -> tuple[PresetFile, ...]:
        """Return the user's presets, by table."""
        return tuple(file for _, files in sorted(self.presets.items()) for file in files)

    def forget(self, where: Where) -> None:
        """Remove the presets of a table that another one replaces."""
        for known in [known for known in self.presets if known[: len(where)] == where]:
            del self.presets[known]


def resolve(under: Any, over: Any, notes: Notes, where: Where = (), trail: tuple[PresetFile, ...] = ()) -> Any:
    """The table `over` merged over `under`, both at the path `where` of a job; neither is edited.

    trail: the presets that led to `over`, each starting from the next. A key that
    names something unknown is left out and added to the notes' issues, so that the rest is
    still checked; InputError when that is `over` itself.
    """
    if isinstance(over, str) and where in PRESET_TABLES:
        over = {"preset": over}
    if not isinstance(over, dict) or (not isinstance(under, dict) and len(where) > DEEPEST):
        return over
    over, renamed = with_new_names(over, where)
    notes.warnings.extend(renamed)
    base, keys = _split(over, where)
    if base is not None:
        if not trail:
            notes.forget(where)
        under = _expanded(base, notes, where, trail)
        if where == MODEL and isinstance(under, dict):
            under = with_positions(under)
    table = dict(under) if isinstance(under, dict) else {}
    if where == MODEL:
        table = without_derived(table)
    for key, value in keys.items():
        try:
            table[key] = resolve(table.get(key), value, notes, (*where, key))
        except InputError as error:
            notes.issues.extend(error.issues)
            table.pop(key, None)
    return table


def _expanded(base: Base, notes: Notes, where: Where, trail: tuple[PresetFile, ...]) -> Any:
    """The table of a base, merged over the bases that it starts from itself. Raises InputError
    where presets start from each other in a circle or too often, or a user's preset is not
    valid."""
    if base.file is None:
        return resolve({}, base.table, notes, where)
    trail = (*trail, base.file)
    if not base.file.is_bundled:
        notes.presets.setdefault(where, []).append(base.file)
    names, path = " -> ".join(file.name for file in trail), str(base.file.path)
    if base.file.path.resolve() in {file.path.resolve() for file in trail[:-1]}:
        message = f"presets start from each other: {names}"
        raise InputError.of("preset-circle", path, message, "rename one of them")
    if len(trail) > LONGEST_TRAIL:
        message = f"more than {LONGEST_TRAIL} presets start from each other: {names}"
        raise InputError.of("preset-circle", path, message, "put some of them into one file")
    table = resolve({}, base.table, notes, where, trail)
    if not base.file.is_bundled:
        require_valid(base.file, table, MODELS[where])
    return table


def _split(over: Raw, where: Where) -> tuple[Base | None, Raw]:
    """The base that a table names, if any, and its own keys."""
    if where not in PRESET_TABLES:
        return None, over
    starts = ("preset", "hf_config") if where == MODEL else ("preset",)
    named = {key: over[key] for key in starts if over.get(key) is not None}
    if len(named) > 1:
        message = "a model starts from a config or from a preset, and model.preset is given too"
        raise InputError.of("two-bases", "model.hf_config", message, "leave one of them out")
    base = _base(where, *named.popitem()) if named else None
    return base, {key: value for key, value in over.items() if key not in starts}


def _base(where: Where, key: str, name: Any) -> Base:
    if key == "hf_config" or (where == MODEL and is_config(name)):
        from mpctl.spec.hf import shape_from_hf  # few jobs get here, and it takes time to import

        return Base(shape_from_hf(name))
    if where == MODEL and is_hub_id(name):
        from mpctl.spec.hf import shape_by_id

        if (shape := shape_by_id(name)) is not None:
            return Base({**shape, "hub_id": name})
    file = get_file(PRESET_TABLES[where], str(name), where=".".join(where) or "preset")
    if not where:
        return Base(read_job_preset(file), file)
    table = {"name": file.name, **file.read()}
    if where == MODEL:
        ids = file.hub_ids()  # raises where they are not a list
        table.pop(HUB_IDS, None)  # belongs to the preset, not to tables that start from it
        if is_hub_id(name):
            # Several models have the shape of one preset.
            table["hub_id"] = next(spelt for spelt in ids if spelt.lower() == name.lower())
        elif ids and not file.is_bundled:
            table.setdefault("hub_id", ids[0])  # above that of a preset below it
    return Base(table, file)


def read_job_preset(file: PresetFile) -> Raw:
    """A job preset's tables, settings under their full names. Raises InputError."""
    table = with_full_names(file.table())
    return table if file.is_bundled else anchored(table, file.path.parent)
