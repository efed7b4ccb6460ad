"""What may be written for a setting: the words that are legal, as a shell completes them.

By hand: `training.recompute` takes none, selective or full; `parallel.tp` any number, so none is
listed; `training.runtime` the names of the runtimes that there are, one's own among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as bounds
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mpctl.axes import AXIS_NAMES
from mpctl.spec.families import family_names
from mpctl.spec.job import JobSpec
from mpctl.spec.names import TABLES, tables_with
from mpctl.spec.presets import PRESET_TABLES, preset_names

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
    return list(dict.fromkeys(_words(field.annotation, tuple(field.metadata))))


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


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        inner = _table(field)
        if inner is None or (*prefix.split(".")[:-1], name) in PRESET_TABLES:
            yield f"{prefix}{name}", field
        if inner is not None:
            yield from _leaves(inner, f"{prefix}{name}.")


def _table(field: FieldInfo) -> type[BaseModel] | None:
    for part in (field.annotation, *get_args(field.annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


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
    found = [
        m for item in metadata for m in (item.metadata if isinstance(item, FieldInfo) else [item])
    ]
    low = next((m.ge for m in found if isinstance(m, bounds.Ge)), None)
    high = next((m.le for m in found if isinstance(m, bounds.Le)), None)
    return low, high  # type: ignore[return-value]
