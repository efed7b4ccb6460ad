"""From a file or preset, flags and `--set` to one resolved JobSpec, or to every issue at once.

Order, later wins: preset of the job, its own keys, presets named inside it, single keys over those,
flags, `--set`. A table may be given as a preset's name (`model = "gpt2"`) or start from one
(`[model] preset = "gpt2"`, `layers = 4`).
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from mpctl.errors import InputError, Issue
from mpctl.spec.hf import shape_from_hf
from mpctl.spec.job import JobSpec, complete
from mpctl.spec.presets import Kind, find_preset, get_preset, preset_names

Raw = dict[str, Any]
PRESET_TABLES: dict[str, Kind] = {"cluster": "clusters", "model": "models"}


@dataclass(frozen=True)
class Loaded:
    """What could be read: the job without its bad keys, every issue, and the tables whose values
    are therefore in doubt (a default stands where something illegal was written)."""

    job: JobSpec | None
    issues: tuple[Issue, ...] = ()
    doubtful: frozenset[str] = frozenset()


def load_job(source: str | None, overrides: Mapping[str, Any] | None = None) -> JobSpec:
    """Resolve a job. source: a path, a preset's name, or None for an empty job.

    overrides: dotted settings to values, `{"parallel.tp": 2, "model": "gpt2"}`.
    Raises InputError carrying all issues.
    """
    return _get_job(load_partial(source, overrides))


def load_partial(source: str | None, overrides: Mapping[str, Any] | None = None) -> Loaded:
    """As load_job, but issues are returned beside what could be read in spite of them."""
    raw = read_source(source) if source else {}
    return partial_from_raw(raw, overrides or {})


def job_from_raw(raw: Raw, overrides: Mapping[str, Any]) -> JobSpec:
    return _get_job(partial_from_raw(raw, overrides))


def partial_from_raw(raw: Raw, overrides: Mapping[str, Any]) -> Loaded:
    raw = {key: _as_table(key, value) for key, value in raw.items()}
    for where, value in overrides.items():
        _assign(raw, where, value)
    issues: list[Issue] = []
    raw = _expand(raw, issues)
    in_doubt = {issue.where.split(".")[0] for issue in issues}
    try:
        return Loaded(complete(parse(raw)), tuple(issues), frozenset(in_doubt))
    except _SchemaError as error:
        issues += error.issues
        in_doubt |= {str(loc[0]) for kind, loc in error.places if kind != "extra_forbidden"}
        return Loaded(_salvage(raw, error), tuple(issues), frozenset(in_doubt))


def _get_job(loaded: Loaded) -> JobSpec:
    if loaded.issues or loaded.job is None:
        raise InputError(loaded.issues)
    return loaded.job


class _SchemaError(InputError):
    """Keys that the schema refuses, and where they stand."""

    def __init__(self, error: ValidationError) -> None:
        super().__init__(_issues_of(error))
        details = error.errors(include_url=False)
        self.places = [(detail["type"], detail["loc"]) for detail in details]


def parse(raw: Raw) -> JobSpec:
    """The strict model of a fully expanded job; raises InputError."""
    try:
        return JobSpec.model_validate(raw)
    except ValidationError as error:
        raise _SchemaError(error) from None


def _salvage(raw: Raw, error: _SchemaError) -> JobSpec | None:
    """The job without the refused keys, so that its rules can still be asked."""
    kept = _copy(raw)
    for kind, loc in error.places:
        path = loc[:1] if kind == "missing" else loc  # a table that lacks a key is left out
        table = kept
        for key in path[:-1]:
            table = table.get(key, {}) if isinstance(table, dict) else {}
        if isinstance(table, dict):
            table.pop(path[-1], None)
    try:
        return complete(parse(kept))
    except InputError:
        return None


def read_source(source: str) -> Raw:
    """The raw tables of a job file (TOML, or the job.json of a run) or of a job preset."""
    path = Path(source)
    if path.suffix in (".toml", ".json") or path.is_file():
        return _read_file(path)
    found = find_preset("jobs", source)
    if found is None:
        names = preset_names("jobs")
        near = difflib.get_close_matches(source, names, n=3) or names
        raise InputError.of(
            "no-such-job",
            "JOB",
            f"{source!r} is neither a file nor a job preset",
            f"presets: {', '.join(near)}",
        )
    return found


def _read_file(path: Path) -> Raw:
    try:
        text = path.read_text("utf-8")
        raw = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise InputError.of("no-such-file", str(path), error.strerror or str(error)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError) as error:
        raise InputError.of("bad-syntax", str(path), str(error)) from None
    if not isinstance(raw, dict):
        raise InputError.of("bad-syntax", str(path), "a job is a table of tables")
    return raw


def parse_settings(settings: Iterable[str]) -> Raw:
    """`["parallel.tp=2", "model=gpt2"]` -> `{"parallel.tp": 2, "model": "gpt2"}`.

    A value is read as TOML; what is not TOML is taken as a string.
    """
    parsed: Raw = {}
    for setting in settings:
        where, equals, text = setting.partition("=")
        if not equals or not where:
            raise InputError.of(
                "bad-set",
                "--set",
                f"{setting!r} is not KEY=VALUE",
                "for example --set parallel.tp=2",
            )
        try:
            parsed[where.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            parsed[where.strip()] = text
    return parsed


def _as_table(key: str, value: Any) -> Any:
    if key in PRESET_TABLES:
        return {"preset": value} if isinstance(value, str) else _copy(value)
    return _copy(value)


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, dict) else value


def _assign(raw: Raw, where: str, value: Any) -> None:
    *path, last = where.split(".")
    table = raw
    for depth, key in enumerate(path):
        held = table.get(key)
        if isinstance(held, str):  # cluster.device = "cpu", then cluster.device.memory_bytes = 1
            held = {"preset": held}
        table[key] = held = {} if held is None else held
        if not isinstance(held, dict):
            raise InputError.of("bad-set", where, f"{'.'.join(path[: depth + 1])} is not a table")
        table = held
    table[last] = _as_table(last, value) if not path else value


def _expand(raw: Raw, issues: list[Issue]) -> Raw:
    """Replace every preset's name by its table; single keys beside the name win over it.

    What cannot be found is added to `issues` and left out, so that the rest is still checked.
    """
    raw = dict(raw)
    for key, kind in PRESET_TABLES.items():
        _expand_key(raw, key, kind, key, issues)
    if isinstance(raw.get("model"), dict) and "hf_config" in raw["model"]:
        own = {k: v for k, v in raw["model"].items() if k != "hf_config"}
        try:
            raw["model"] = {**shape_from_hf(Path(str(raw["model"]["hf_config"]))), **own}
        except InputError as error:
            issues.extend(error.issues)
            del raw["model"]
    if isinstance(raw.get("cluster"), dict):
        raw["cluster"] = cluster = dict(raw["cluster"])
        if isinstance(cluster.get("device"), str):
            cluster["device"] = {"preset": cluster["device"]}
        _expand_key(cluster, "device", "devices", "cluster.device", issues)
    return raw


def _expand_key(table: Raw, key: str, kind: Kind, where: str, issues: list[Issue]) -> None:
    own = table.get(key)
    if not isinstance(own, dict) or "preset" not in own:
        return
    try:
        base = get_preset(kind, str(own["preset"]), where=where)
    except InputError as error:
        issues.extend(error.issues)
        del table[key]
        return
    own = {k: v for k, v in own.items() if k != "preset"}
    table[key] = {"name": base.get("name", table[key]["preset"]), **base, **own}


def _issues_of(error: ValidationError) -> list[Issue]:
    details = [dict(detail) for detail in error.errors(include_url=False)]
    return [_issue_of(d) for d in details if not (d["type"] == "missing" and _is_derived(d))]


def _is_derived(detail: Raw) -> bool:
    """A model key that follows from another one, whose own absence is what is reported."""
    return detail["loc"][0] == "model" and detail["loc"][-1] in ("ffn", "kv_heads", "max_positions")


def _issue_of(detail: Raw) -> Issue:
    loc = [str(part) for part in detail["loc"]]
    where = ".".join(loc)
    if detail["type"] == "extra_forbidden":
        return Issue("unknown-key", where, "there is no such setting", _nearest(loc))
    if detail["type"] == "missing":
        return Issue("missing", where, "is required and was not given")
    value = detail.get("input")
    shown = f"{value!r} " if isinstance(value, str | int | float | bool) else ""
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return Issue("bad-value", where, f"{shown}is not allowed: {message}")


def _nearest(loc: list[str]) -> str:
    """The legal keys nearest to an unknown one, elsewhere in the job if none is near here."""
    here = _fields_at(loc[:-1])
    near = difflib.get_close_matches(loc[-1], here, n=2)
    if near:
        return f"did you mean {' or '.join('.'.join([*loc[:-1], name]) for name in near)}?"
    tables = [name for name in JobSpec.model_fields if loc[-1] in _fields_at([name])]
    if tables:
        return f"did you mean {tables[0]}.{loc[-1]}?"
    return f"keys here: {', '.join(here)}" if here else ""


def _fields_at(path: list[str]) -> list[str]:
    model: Any = JobSpec
    for key in path:
        field = model.model_fields.get(key)
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
        models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not models:
            return []
        model = models[0]
    return list(model.model_fields)
