"""A field's type, default and bounds as a reader of a job file would write them."""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types as bounds
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mpctl.spec.base import Measured

WIDE = 1000  # upper over lower bound: wider ranges only guard against slips
NAMES = {int: "integer", float: "number", str: "string", bool: "bool"}


def type_text(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """`list[str] | None` -> `list of string`: None is an absent key and told as the default. A
    number that may have a unit is told by a text that is one, a list by what it holds unless that is text."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if measured := [item for item in metadata if isinstance(item, Measured)]:
        return f'`"{measured[0].measure.example}"`'
    if hasattr(annotation, "__metadata__"):
        return type_text(annotation.__origin__, annotation.__metadata__)
    if origin is Literal:
        return f"`{'|'.join(map(str, arguments))}`"
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(part) for part in arguments if part is not type(None))
    if origin is list:
        return "list" if arguments[0] is str else f"list of {type_text(arguments[0])}"
    if origin is dict:
        return f"table of {type_text(arguments[1])} by {type_text(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)).lower())


def default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""
    return "" if value in (None, [], {}, "") else f"`{json.dumps(value)}`"


def bounds_text(field: FieldInfo) -> str:
    """The bounds of the numbers in a field, `0 to 3`; none that only guard against slips of the pen."""
    ranges = [_range_text(limits) for limits in _numbers(field.annotation, field.metadata) if not _wide(limits)]
    return "; ".join(dict.fromkeys(ranges))


def _numbers(annotation: Any, metadata: Any = ()) -> Iterator[list[Any]]:
    """The constraints on each number in an annotation."""
    if annotation in (int, float):
        yield [m for item in metadata for m in _constraints(item)]
    inner = getattr(annotation, "__metadata__", ())
    for part in get_args(annotation):
        if part not in inner:
            yield from _numbers(part, (*metadata, *inner))


def _wide(limits: list[Any]) -> bool:
    """Whether a range spans so much that no reader needs it."""
    most = [m.le if isinstance(m, bounds.Le) else m.lt for m in limits if isinstance(m, bounds.Le | bounds.Lt)]
    least = [m.ge for m in limits if isinstance(m, bounds.Ge) and m.ge > 0]
    return any(high >= WIDE * low for high in most for low in least or [1])


def _constraints(item: Any) -> list[Any]:
    return item.metadata if isinstance(item, FieldInfo) else [item]


def _range_text(metadata: list[Any]) -> str:
    least = [number_text(m.ge) for m in metadata if isinstance(m, bounds.Ge)]
    least += [f"above {number_text(m.gt)}" for m in metadata if isinstance(m, bounds.Gt)]
    most = [number_text(m.le) for m in metadata if isinstance(m, bounds.Le)]
    most += [f"below {number_text(m.lt)}" for m in metadata if isinstance(m, bounds.Lt)]
    return " to ".join([*least, *most])


def number_text(value: float) -> str:
    """`2**31 - 1` -> `2^31 - 1`, `10000` -> `10,000`, `1e-30` as it stands."""
    if isinstance(value, int):
        if value >= 2**16:
            for number, rest in ((value, ""), (value + 1, " - 1")):
                if number & (number - 1) == 0:
                    return f"2^{number.bit_length() - 1}{rest}"
        return f"{value:,}"
    return f"{value:g}"
