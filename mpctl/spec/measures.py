"""Numbers of a job file that have a unit: plain, in the base unit, or as text with the unit.

`bandwidth = 448e9` and `bandwidth = "448 GB/s"` are the same number of bytes per second, and
`"3584 Gb/s"` too, in bits. Whatever is written, a job holds the plain number. The units and what a
text may look like: units.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

from mpctl.units import BANDWIDTH, COMPUTE, MEMORY, TIME, Measure, UnitError, parse_measure

TEXT_ERROR = "measure"  # pydantic's type of an error about such a text; its `hint` is the way out


@dataclass(frozen=True)
class Measured:
    """Annotates a number that may also be written as text with a unit of this measure."""

    measure: Measure

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
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
