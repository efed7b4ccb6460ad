"""What may stand in a job file: its JSON Schema, the names of settings, the words legal for one.

The schema of a job *file* is JobSpec's, plus the forms that a file may use for presets. Of a
setting that takes any number or text no words are listed.

>>> choices_of("training.recompute"), choices_of("parallel.tp")
(['none', 'selective', 'full'], [])
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc
from itertools import permutations
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from mpctl.axes import AXIS_NAMES
from mpctl.spec.base import Bounded, FieldInfo, Measured, StrictModel, table_of
from mpctl.spec.families import family_names
from mpctl.spec.job import JobSpec
from mpctl.spec.names import TABLES, tables_with
from mpctl.spec.presets import PRESET_TABLES, Kind, name_or_path, preset_names

STARTS: dict[str, Kind] = {
    "ClusterSpec": "clusters",
    "ModelSpec": "models",
    "DeviceSpec": "devices",
}


TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}
LIMITS = {
    "ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum",
    "pattern": "pattern",
}  # fmt: skip


def job_schema() -> dict[str, Any]:
    """Tables that may start from a preset accept its name alone, or `preset` beside other keys."""
    definitions: dict[str, Any] = {}
    schema = _table_schema(JobSpec, definitions)
    schema = {"$defs": dict(sorted(definitions.items())), **schema}
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
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "mpctl job",
    }


def _table_schema(model: type[StrictModel], definitions: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a table; those of tables within are added to `definitions`."""
    properties = {}
    for name, field in model.model_fields.items():
        schema = _value_schema(field.annotation, definitions)
        schema["description"] = field.description
        if not field.is_required() and not isinstance(field.default, type):
            schema["default"] = field.default
        if table_of(field.annotation) is None or get_origin(field.annotation) is list:
            schema["title"] = name.replace("_", " ").title()
        if field.json_schema_extra:
            field.json_schema_extra(schema)
        properties[name] = dict(sorted(schema.items()))
    required = [name for name, field in model.model_fields.items() if field.is_required()]
    return {
        "additionalProperties": False,
        "description": cleandoc(model.__doc__ or ""),
        "properties": properties,
        **({"required": required} if required else {}),
        "title": model.__name__,
        "type": "object",
    }


def _value_schema(annotation: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a value of this type."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _limited(_value_schema(parts[0], definitions), parts[1:])
    if origin is Literal:
        values = {"enum": list(parts)} if len(parts) > 1 else {"const": parts[0]}
        return {**values, "type": "string"}
    if origin in (Union, UnionType):
        choices: list[dict[str, Any]] = []
        for part in parts:
            schema = _value_schema(part, definitions)
            choices += schema.get("anyOf", [schema])
        return {"anyOf": choices}
    if origin is list:
        return {"items": _value_schema(parts[0], definitions), "type": "array"}
    if origin is dict:
        values = _value_schema(parts[1], definitions)
        names = get_args(parts[0])  # of a Literal
        schema = {"additionalProperties": values, "type": "object"}
        return schema | ({"propertyNames": {"enum": list(names)}} if names else {})
    if issubclass(annotation, StrictModel):
        if annotation.__name__ not in definitions:
            definitions[annotation.__name__] = {}
            definitions[annotation.__name__] = _table_schema(annotation, definitions)
        return {"$ref": f"#/$defs/{annotation.__name__}"}
    return {"type": TYPES[annotation]}


def _limited(schema: dict[str, Any], marks: tuple[Any, ...]) -> dict[str, Any]:
    """The JSON schema of a value that is marked by its limits, or as a measure."""
    noun = "Items" if schema["type"] == "array" else "Length"
    names = LIMITS | {"min_length": f"min{noun}", "max_length": f"max{noun}"}
    for mark in marks:
        if isinstance(mark, Bounded):
            schema |= {names[key]: value for key, value in mark.limits.items()}
        if isinstance(mark, Measured):
            text = {"pattern": mark.measure.pattern, "type": "string"}
            schema = {"anyOf": [dict(sorted(schema.items())), text]}
    return dict(sorted(schema.items()))


MOST_NUMBERS = 10  # a range of so many is listed


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
    return list(dict.fromkeys(_words(field.annotation)))


def description_of(setting: str) -> str:
    """What a setting means, by its full name; empty for what is no setting."""
    field = _field(tuple(setting.split(".")))
    return (field.description or "") if field else ""


def settings(*, short: bool = False) -> list[str]:
    """The full names of all settings; short: those whose key stands in one table, by it alone."""
    names = [name for name, _ in _leaves(JobSpec)]
    if not short:
        return names
    keys = [name.split(".") for name in names if name.count(".") == 1]
    return [key for table, key in keys if table in TABLES and tables_with(key) == [table]]


def _leaves(model: type[StrictModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        inner = table_of(field.annotation)
        if inner is None or (*prefix.split(".")[:-1], name) in PRESET_TABLES:
            yield f"{prefix}{name}", field
        if inner is not None:
            yield from _leaves(inner, f"{prefix}{name}.")


def _field(path: tuple[str, ...]) -> FieldInfo | None:
    return dict(_leaves(JobSpec)).get(".".join(path))


def _words(annotation: Any, limits: Bounded | None = None) -> Iterator[str]:
    """The words of an annotation: of a Literal, a boolean, or a short range of integers."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limited = next((mark for mark in parts[1:] if isinstance(mark, Bounded)), None)
        yield from _words(parts[0], limited)
    elif origin is Literal:
        yield from map(str, parts)
    elif origin in (Union, UnionType):
        for part in parts:
            yield from _words(part)
    elif annotation is bool:
        yield from ("true", "false")
    elif annotation is int and limits is not None:
        low, high = limits.limits.get("ge"), limits.limits.get("le")
        if low is not None and high is not None and high - low < MOST_NUMBERS:
            yield from map(str, range(low, high + 1))
