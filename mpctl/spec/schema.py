"""The contents of a job file: its JSON Schema, the names of settings, the legal words of each.

The schema of a job *file* is JobSpec's, plus the forms that a file may use for presets. No words
are listed for a setting that takes any number or text.

>>> choices_of("training.recompute"), choices_of("parallel.tp")
(['none', 'selective', 'full'], [])
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as bounds
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mpctl.core.axes import AXIS_NAMES
from mpctl.spec.base import table_of
from mpctl.spec.families import family_names
from mpctl.spec.job import JobSpec
from mpctl.spec.names import TABLES, tables_with
from mpctl.spec.presets import PRESET_TABLES, Kind, name_or_path, preset_names

STARTS: dict[str, Kind] = {"ClusterSpec": "clusters", "ModelSpec": "models", "DeviceSpec": "devices"}


def job_schema() -> dict[str, Any]:
    """The JSON Schema; where a table may start from a preset, a name or a key `preset` is legal."""
    schema = JobSpec.model_json_schema()
    for table, kind in STARTS.items():
        body = schema["$defs"][table]
        names = {"type": "string", "anyOf": name_or_path(kind)}
        body["properties"]["preset"] = {**names, "description": "start from this preset"}
        if table == "ModelSpec":
            body["properties"]["hf_config"] = {
                "type": "string",
                "description": "take the shape from a Hugging Face config.json",
            }
        body.pop("required", None)  # a preset, or hf_config, may bring what is required
        schema["$defs"][table] = {"anyOf": [names, body]}
    schema.pop("required", None)
    jobs = {"type": "string", "anyOf": name_or_path("jobs")}
    schema["properties"]["preset"] = {**jobs, "description": "start from this job preset"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "mpctl job"}


MOST_NUMBERS = 10  # a range of at most this many numbers is listed


def choices_of(setting: str) -> list[str]:
    """The legal words of a setting by its full name; [] where any number or text is legal, or
    there is no such setting."""
    path = tuple(setting.split("."))
    if path in PRESET_TABLES:
        return preset_names(PRESET_TABLES[path])
    field = _field(path)
    if field is None:
        return []
    if path == ("training", "runtime"):
        return preset_names("runtimes")
    if path == ("model", "family"):
        return list(family_names())
    if path == ("parallel", "order"):
        return ["-".join(axes) for axes in permutations(AXIS_NAMES)]
    return list(dict.fromkeys(_words(field.annotation, tuple(field.metadata))))


def description_of(setting: str) -> str:
    """The description of a setting, by its full name; empty where there is no such setting."""
    field = _field(tuple(setting.split(".")))
    return (field.description or "") if field else ""


def settings(*, short: bool = False) -> list[str]:
    """The full names of all settings; short: the key alone where only one table has it."""
    names = [name for name, _ in _leaves(JobSpec)]
    if not short:
        return names
    keys = [name.split(".") for name in names if name.count(".") == 1]
    return [key for table, key in keys if table in TABLES and tables_with(key) == [table]]


def find_settings(text: str) -> dict[str, dict[str, Any]]:
    """The settings whose name or description has every word of a text: by full name, in the words of a JSON Schema.

    >>> list(find_settings("gradient clipping"))
    ['training.clip_norm']
    """
    words, found = text.lower().split(), dict[str, dict[str, Any]]()
    for name, field in _leaves(JobSpec):
        said = f"{name} {field.description or ''}".lower()
        if all(word in said for word in words):
            choices = choices_of(name)
            found[name] = {"description": field.description or "", **({"enum": choices} if choices else {})}
    return found


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        is_list = get_origin(field.annotation) is list  # its tables have no keys by name
        inner = None if is_list else table_of(field)
        if inner is None or (*prefix.split(".")[:-1], name) in PRESET_TABLES:
            yield f"{prefix}{name}", field
        if inner is not None:
            yield from _leaves(inner, f"{prefix}{name}.")


def _field(path: tuple[str, ...]) -> FieldInfo | None:
    return dict(_leaves(JobSpec)).get(".".join(path))


def _words(annotation: Any, metadata: tuple[Any, ...]) -> Iterator[str]:
    """The words of an annotation: of a Literal, a boolean, or a short range of integers."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _words(parts[0], (*metadata, *parts[1:]))
    elif origin is Literal:
        yield from map(str, parts)
    elif origin in (Union, UnionType):
        for part in parts:
            yield from _words(part, metadata)
    elif annotation is bool:
        yield from ("true", "false")
    elif annotation is int:
        low, high = _range(metadata)
        if low is not None and high is not None and high - low < MOST_NUMBERS:
            yield from map(str, range(low, high + 1))


def _range(metadata: tuple[Any, ...]) -> tuple[int | None, int | None]:
    """The least and the largest integer that constraints allow."""
    found = [m for item in metadata for m in (item.metadata if isinstance(item, FieldInfo) else [item])]
    low = next((m.ge for m in found if isinstance(m, bounds.Ge)), None)
    high = next((m.le for m in found if isinstance(m, bounds.Le)), None)
    return low, high  # type: ignore[return-value]
