"""The types of a job file's values, and the base of its tables, strict and never edited.

Every number has bounds. They are far outside of what exists and only keep what follows from a job
finite: no accepted figure makes an estimate overflow, divide by zero or fill the memory.

A number with a unit may be written plain, in the base unit, or as text with the unit:
`bandwidth = 448e9` and `bandwidth = "448 GB/s"` are the same number of bytes per second, and
`"3584 Gb/s"` too, in bits (units.py). A job holds the plain number.

Tables are read by pydantic-core, pydantic's validator, from schemas that are built here and when a
table is first read: importing pydantic's own models costs a plan two thirds of all that it imports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import cached_property
from inspect import get_annotations
from itertools import pairwise
from textwrap import shorten
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    Union,
    cast,
    get_args,
    get_origin,
)

from pydantic_core import PydanticCustomError, SchemaSerializer, SchemaValidator

from mpctl.units import BANDWIDTH, COMPUTE, MEMORY, TIME, Measure, UnitError, parse_measure

TEXT_ERROR = "measure"  # pydantic's type of an error about such a text; its `hint` is the way out
REQUIRED: Any = object()  # the default of a key that has none
CONFIG = {"strict": True, "extra_fields_behavior": "forbid", "allow_inf_nan": False}
CoreSchema = dict[str, Any]  # as pydantic_core.core_schema defines them


class Bounded:
    """Annotates a value with what bounds it: ge, gt, le and lt of a number, min_length, max_length
    and pattern of a text, min_length of a list."""

    def __init__(self, **limits: Any) -> None:
        self.limits = limits

    def around(self, schema: CoreSchema) -> CoreSchema:
        """The schema of such a value."""
        return schema | self.limits


class Before(NamedTuple):
    """Annotates a value with a function that changes what was given before it is checked."""

    read: Callable[[Any], Any]

    def around(self, schema: CoreSchema) -> CoreSchema:
        """The schema of such a value."""
        function = {"type": "no-info", "function": self.read}
        return {"type": "function-before", "function": function, "schema": schema}


class After(NamedTuple):
    """Annotates a value with a function that checks it further."""

    check: Callable[[Any], Any]

    def around(self, schema: CoreSchema) -> CoreSchema:
        """The schema of such a value."""
        function = {"type": "no-info", "function": self.check}
        return {"type": "function-after", "function": function, "schema": schema}


class Measured(NamedTuple):
    """Annotates a number that may also be written as text with a unit of this measure."""

    measure: Measure

    def around(self, schema: CoreSchema) -> CoreSchema:
        """The schema of such a number."""
        is_whole = schema["type"] == "int"

        def read(value: Any) -> Any:
            if not isinstance(value, str):
                return value
            try:
                number = parse_measure(value, self.measure)
            except UnitError as error:
                context = {"message": str(error), "hint": error.hint}
                raise PydanticCustomError(TEXT_ERROR, "{message}", context) from None
            return round(number) if is_whole else float(number)

        return Before(read).around(schema)


AS_MEMORY, AS_BANDWIDTH = Measured(MEMORY), Measured(BANDWIDTH)
AS_COMPUTE, AS_TIME = Measured(COMPUTE), Measured(TIME)


Count = Annotated[int, Bounded(ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Bounded(ge=0, le=2**31 - 1)]
Layers = Annotated[int, Bounded(ge=1, le=10_000)]
Heads = Annotated[int, Bounded(ge=1, le=2**16)]
Hidden = Annotated[int, Bounded(ge=1, le=2**20)]
Width = Annotated[int, Bounded(ge=1, le=2**24)]
Rows = Annotated[int, Bounded(ge=1, le=2**30)]
"""Rows of a table of embeddings, or tokens of a sequence."""

Bytes = Annotated[int, Bounded(ge=1, le=2**60), AS_MEMORY]
BytesPerSecond = Annotated[float, Bounded(ge=1e3, le=1e18), AS_BANDWIDTH]
FlopPerSecond = Annotated[float, Bounded(ge=1e6, le=1e21), AS_COMPUTE]
Seconds = Annotated[float, Bounded(ge=0, le=1e3), AS_TIME]
"""What a kernel, a message or a step costs besides its work."""

Timeout = Annotated[float, Bounded(ge=1e-3, le=1e7), AS_TIME]
"""Seconds to wait before giving up; the upper bound is some four months."""

Share = Annotated[float, Bounded(ge=0, le=1)]
Probability = Annotated[float, Bounded(ge=0, lt=1)]
Part = Annotated[float, Bounded(ge=1e-4, le=10)]
"""The part of a nominal rate that is reached; above 1 where a data sheet says too little."""

Factor = Annotated[float, Bounded(ge=1e-3, le=1e3)]
Amount = Annotated[float, Bounded(ge=0, le=1e6)]
"""How often a tensor is passed over, or how many bytes are moved for an element."""

Hyper = Annotated[float, Bounded(ge=0, le=1e6)]
PositiveHyper = Annotated[float, Bounded(ge=1e-30, le=1e6)]
DType = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]


class FieldInfo(NamedTuple):
    """A key of a table: the type of its value, what it means, and what it is when absent; where the
    default is a type (list, dict, another table), a new one of it.

    json_schema_extra: completes the JSON schema of the value.
    """

    annotation: Any
    description: str
    default: Any
    json_schema_extra: Callable[[dict[str, Any]], None] | None

    def is_required(self) -> bool:
        """Whether a table must have the key."""
        return self.default is REQUIRED

    def get_default(self) -> Any:
        """What the key is when absent."""
        return self.default() if isinstance(self.default, type) else copy(self.default)

    @property
    def schema(self) -> CoreSchema:
        """What pydantic-core checks the key by."""
        schema = schema_of(self.annotation)
        if isinstance(self.default, type):
            schema = {"type": "default", "schema": schema, "default_factory": self.default}
        elif not self.is_required():
            is_edited = isinstance(self.default, list)
            schema = {"type": "default", "schema": schema, "default": self.default,
                      "copy_default": is_edited}  # fmt: skip
        return {"type": "model-field", "schema": schema}


def Field(
    description: str, default: Any = REQUIRED, *,
    json_schema_extra: Callable[[dict[str, Any]], None] | None = None,
) -> Any:  # fmt: skip
    """A key of a table, beside its annotation."""
    return FieldInfo(None, description, default, json_schema_extra)


def schema_of(annotation: Any) -> CoreSchema:
    """What pydantic-core checks a value of this type by."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        schema = schema_of(parts[0])
        for mark in parts[1:]:
            schema = mark.around(schema)
        return schema
    if origin is Literal:
        return {"type": "literal", "expected": list(parts)}
    if origin in (Union, UnionType):
        choices = [schema_of(part) for part in parts if part is not NoneType]
        schema = {"type": "union", "choices": choices} if len(choices) > 1 else choices[0]
        return {"type": "nullable", "schema": schema} if NoneType in parts else schema
    if origin is list:
        return {"type": "list", "items_schema": schema_of(parts[0])}
    if origin is dict:
        keys, values = map(schema_of, parts)
        return {"type": "dict", "keys_schema": keys, "values_schema": values}
    if issubclass(annotation, StrictModel):
        return cast(type[StrictModel], annotation).schema()
    return {"type": annotation.__name__}


class _Core:
    """What pydantic-core makes of the schema of a table, when it is first needed."""

    def __init__(self, model: type[StrictModel]) -> None:
        self.model = model

    @cached_property
    def validator(self) -> SchemaValidator:
        return SchemaValidator(cast(Any, self.model.schema()))

    @cached_property
    def serializer(self) -> SchemaSerializer:
        return SchemaSerializer(cast(Any, self.model.schema()))


class StrictModel:
    """A table of a job file or a preset: no unknown key, no conversion of types, never edited.

    Its methods are those of a pydantic model.
    """

    __slots__ = (
        "__dict__", "__pydantic_extra__", "__pydantic_fields_set__", "__pydantic_private__",
    )  # fmt: skip
    __pydantic_fields_set__: set[str]
    model_fields: ClassVar[dict[str, FieldInfo]] = {}
    _core: ClassVar[_Core]

    def __init_subclass__(cls) -> None:
        own = {}
        for name, annotation in get_annotations(cls).items():
            own[name] = getattr(cls, name)._replace(annotation=annotation)
            delattr(cls, name)
        cls.model_fields = cls.model_fields | own
        cls._core = _Core(cls)

    @classmethod
    def schema(cls) -> CoreSchema:
        """What pydantic-core checks the table by."""
        fields = {name: field.schema for name, field in cls.model_fields.items()}
        inner = {"type": "model-fields", "model_name": cls.__name__, "fields": fields}
        schema = Before(cls.completed).around(inner)
        return {"type": "model", "cls": cls, "schema": schema, "config": CONFIG}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        """What a pydantic model checks the table by that has it as a field."""
        return cls.schema()

    @classmethod
    def completed(cls, raw: Any) -> Any:
        """A table as it was given, with the keys that follow from others; checked afterwards."""
        return raw

    def __init__(self, **values: Any) -> None:
        self._core.validator.validate_python(values, self_instance=self)

    @classmethod
    def model_validate(cls, raw: Any) -> Self:
        """The table that these values are. Raises pydantic's ValidationError."""
        found: Self = cls._core.validator.validate_python(raw)
        return found

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        """The table that this JSON is. Raises pydantic's ValidationError."""
        found: Self = cls._core.validator.validate_json(text)
        return found

    @classmethod
    def model_construct(cls, given: set[str], values: Mapping[str, Any]) -> Self:
        """A table of these values, unchecked. given: the keys that somebody set."""
        table = cls.__new__(cls)
        table.__setstate__((dict(values), given))
        return table

    def __getstate__(self) -> tuple[dict[str, Any], set[str]]:
        return self.__dict__, self.model_fields_set

    def __setstate__(self, state: tuple[dict[str, Any], set[str]]) -> None:
        object.__setattr__(self, "__dict__", state[0])
        object.__setattr__(self, "__pydantic_fields_set__", state[1])

    @property
    def model_fields_set(self) -> set[str]:
        """The keys that were given, and not left to their defaults."""
        return self.__pydantic_fields_set__

    def model_copy(self, *, update: Mapping[str, Any]) -> Self:
        """The same with some keys changed, unchecked."""
        return self.model_construct(
            self.model_fields_set | update.keys(), {**self.__dict__, **update}
        )

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """The values, tables within as dictionaries. options: pydantic's include, exclude, ..."""
        values: dict[str, Any] = self._core.serializer.to_python(self, **options)
        return values

    def model_dump_json(self, *, indent: int | None = None) -> str:
        """The values as JSON."""
        return self._core.serializer.to_json(self, indent=indent).decode()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: {type(self).__name__} is never edited, see model_copy")

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.__dict__.items()

    def __repr__(self) -> str:
        """What is not the default; tables that have a name by it, and long texts cut."""
        shown = []
        for key, field in self.model_fields.items():
            value = getattr(self, key)
            if field.is_required() or value != field.get_default():
                name = getattr(value, "name", None) if isinstance(value, StrictModel) else None
                shown.append(
                    f"{key}={shorten(value, 60) if isinstance(value, str) else name or value!r}"
                )
        return f"{type(self).__name__}({', '.join(shown)})"


def table_of(annotation: Any) -> type[StrictModel] | None:
    """The table that a key of this type holds, None where it holds none or several."""
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, StrictModel):
            return part
    return None


def fields_at(model: type[StrictModel], path: list[str]) -> list[str]:
    """Keys of the table at `path` below a model; [] where there is no such table."""
    for key in path:
        field = model.model_fields.get(key)
        table = table_of(field.annotation) if field else None
        if table is None:
            return []
        model = table
    return list(model.model_fields)


def rising_ranges(text: str) -> list[tuple[int, int]]:
    """The ranges of steps or batches in a text, as (first, last); none in an empty text. Raises
    ValueError for other text, and where they overlap or do not rise.

    >>> rising_ranges("17, 40-55"), is_within("17, 40-55", 41), is_within("", 1)
    ([(17, 17), (40, 55)], True, False)
    """
    ranges = []
    for part in text.split(",") if text.strip() else ():
        first, dash, last = part.partition("-")
        ranges.append((int(first), int(last if dash else first)))
    ends = [0, *(number for one in ranges for number in one)]
    if ends != sorted(ends) or any(a[1] >= b[0] for a, b in pairwise([(0, 0), *ranges])):
        raise ValueError(f"{text!r} is not in rising order")
    return ranges


def is_within(text: str, number: int) -> bool:
    """Whether a number lies in one of the ranges."""
    return any(first <= number <= last for first, last in rising_ranges(text))


def _require_ranges(what: str) -> After:
    def read(text: str) -> str:
        try:
            rising_ranges(text)
        except ValueError:
            message = "Input should be {what} in rising order such as '17, 40-55'"
            raise PydanticCustomError("rising_ranges", message, {"what": what}) from None
        return text

    return After(read)


BatchRanges = Annotated[str, _require_ranges("batches")]
StepRanges = Annotated[str, _require_ranges("steps")]
