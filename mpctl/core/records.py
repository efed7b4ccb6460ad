"""A record as JSON: its fields, and those of its properties that belong to a document.

A record is a dataclass or a NamedTuple; its keys in JSON are the names of its fields, then those in
its class attribute JSON_PROPERTIES. Only the record defines its keys in documents, and a field that
is added to it appears in every document that contains one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

Json = dict[str, Any]


def to_json(record: object) -> Json:
    """A record as a JSON object; its values are converted by `json_value`.

    Raises TypeError for anything but a dataclass or a NamedTuple.
    """
    if is_dataclass(record) and not isinstance(record, type):
        names = [field.name for field in fields(record)]
    elif isinstance(record, tuple) and hasattr(record, "_fields"):
        names = [*record._fields]
    else:
        raise TypeError(f"{type(record).__name__} is no record")
    names += getattr(type(record), "JSON_PROPERTIES", ())
    return {name: json_value(getattr(record, name)) for name in names}


def json_value(value: object) -> Any:
    """Numbers, texts and None unchanged, sequences as lists, mappings and records as objects.

    >>> json_value({"spans": ((0, 6), (6, 12)), "ranks": range(3)})
    {'spans': [[0, 6], [6, 12]], 'ranks': [0, 1, 2]}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, tuple | list | range) and not hasattr(value, "_fields"):
        return [json_value(item) for item in value]
    return to_json(value)


def flat(table: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Keys and values of a table, such as a row; those of an inner one as `sizes.tp`. Nothing for
    values that are no table."""
    for key, value in table.items() if isinstance(table, Mapping) else ():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
