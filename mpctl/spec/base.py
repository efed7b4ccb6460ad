"""The types of a job file's values, and the base of its tables, strict and never edited.

Every number has bounds. They are far beyond what exists and only ensure that no accepted number
makes an estimate overflow, divide by zero or fill the memory.

A number with a unit may be written without it, in the base unit, or as text with the unit:
`bandwidth = 448e9` and `bandwidth = "448 GB/s"` are the same number of bytes per second, and
`"3584 Gb/s"` too, in bits (units.py). A job holds the plain number.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from textwrap import shorten
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Le, Lt
from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, core_schema

from mpctl.core.units import BANDWIDTH, COMPUTE, MEMORY, TIME, Measure, UnitError, parse_measure

TEXT_ERROR = "measure"  # pydantic's type of an error about such a text; its `hint` is the way out


@dataclass(frozen=True)
class Measured:
    """Annotates a number that may also be written as text with a unit of this measure."""

    measure: Measure

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        convert = int if source is int else float

        def read(value: Any) -> Any:
            if not isinstance(value, str):
                return value
            try:
                number = parse_measure(value, self.measure)
            except UnitError as error:
                context = {"message": str(error), "hint": error.hint}
                raise PydanticCustomError(TEXT_ERROR, "{message}", context) from None
            return convert(round(number) if convert is int else number)

        return core_schema.no_info_before_validator_function(read, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        text = {"type": "string", "pattern": self.measure.pattern}
        return {"anyOf": [handler(schema), text]}


AS_MEMORY, AS_BANDWIDTH = Measured(MEMORY), Measured(BANDWIDTH)
AS_COMPUTE, AS_TIME = Measured(COMPUTE), Measured(TIME)


Count = Annotated[int, Ge(1), Le(2**31 - 1)]
CountOrZero = Annotated[int, Ge(0), Le(2**31 - 1)]
Layers = Annotated[int, Ge(1), Le(10_000)]
LayersOrZero = Annotated[int, Ge(0), Le(10_000)]
Experts = Annotated[int, Ge(1), Le(2**16)]
Heads = Annotated[int, Ge(1), Le(2**16)]
Hidden = Annotated[int, Ge(1), Le(2**20)]
Width = Annotated[int, Ge(1), Le(2**24)]
Rows = Annotated[int, Ge(1), Le(2**30)]
"""Rows of a table of embeddings, or tokens of a sequence."""

Bytes = Annotated[int, Ge(1), Le(2**60), AS_MEMORY]
BytesPerSecond = Annotated[float, Ge(1e3), Le(1e18), AS_BANDWIDTH]
FlopPerSecond = Annotated[float, Ge(1e6), Le(1e21), AS_COMPUTE]
Seconds = Annotated[float, Ge(0), Le(1e3), AS_TIME]
"""Fixed time of a kernel, a message or a step, besides its work."""

Timeout = Annotated[float, Ge(1e-3), Le(1e7), AS_TIME]
"""Seconds to wait before giving up; the upper bound is about four months."""

Share = Annotated[float, Ge(0), Le(1)]
Probability = Annotated[float, Ge(0), Lt(1)]
Part = Annotated[float, Ge(1e-4), Le(10)]
"""The fraction of a nominal rate that is reached; above 1 where a data sheet understates it."""

Factor = Annotated[float, Ge(1e-3), Le(1e3)]
Amount = Annotated[float, Ge(0), Le(1e6)]
"""How often a tensor is read or written, or how many bytes are moved for each element."""

Hyper = Annotated[float, Ge(0), Le(1e6)]
PositiveHyper = Annotated[float, Ge(1e-30), Le(1e6)]
DType = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]


class StrictModel(BaseModel):
    """A table of a job file or a preset: no unknown key, no conversion of types, never edited."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=(), allow_inf_nan=False)

    def __repr_args__(self) -> Iterator[tuple[str, object]]:
        """The values that are not defaults; named tables by their name, long texts shortened."""
        for key, field in type(self).model_fields.items():
            value = getattr(self, key)
            if field.is_required() or value != field.get_default(call_default_factory=True):
                name = getattr(value, "name", None) if isinstance(value, StrictModel) else None
                yield key, shorten(value, 60) if isinstance(value, str) else name or value


def table_of(field: FieldInfo) -> type[BaseModel] | None:
    """The table that a key holds, or that each element of it is; None where it holds none."""
    for part in (field.annotation, *get_args(field.annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    """Keys of the table at `path` below a model; [] where there is no such table."""
    for key in path:
        field = model.model_fields.get(key)
        table = table_of(field) if field else None
        if table is None:
            return []
        model = table
    return list(model.model_fields)


def rising_ranges(text: str) -> list[tuple[int, int]]:
    """The ranges of steps or batches in a text, as (first, last); none in an empty text. Raises
    ValueError for other text, and for ranges that overlap or are not in rising order.

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


def _require_ranges(what: str) -> AfterValidator:
    def read(text: str) -> str:
        try:
            rising_ranges(text)
        except ValueError:
            message = "Input should be {what} in rising order such as '17, 40-55'"
            raise PydanticCustomError("rising_ranges", message, {"what": what}) from None
        return text

    return AfterValidator(read)


BatchRanges = Annotated[str, _require_ranges("batches")]
StepRanges = Annotated[str, _require_ranges("steps")]
