"""The base of every table of a job file: strict types, no unknown key, never edited in place.

Every number has bounds. They are far outside of what exists and only keep what follows from a job
finite: no accepted figure makes an estimate overflow, divide by zero or fill the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import shorten
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from mpctl.spec.measures import AS_BANDWIDTH, AS_COMPUTE, AS_MEMORY, AS_TIME

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Field(ge=0, le=2**31 - 1)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
Heads = Annotated[int, Field(ge=1, le=2**16)]
Hidden = Annotated[int, Field(ge=1, le=2**20)]
Width = Annotated[int, Field(ge=1, le=2**24)]
Rows = Annotated[int, Field(ge=1, le=2**30)]
"""Rows of a table of embeddings, or tokens of a sequence."""

Bytes = Annotated[int, Field(ge=1, le=2**60), AS_MEMORY]
BytesPerSecond = Annotated[float, Field(ge=1e3, le=1e18), AS_BANDWIDTH]
FlopPerSecond = Annotated[float, Field(ge=1e6, le=1e21), AS_COMPUTE]
Seconds = Annotated[float, Field(ge=0, le=1e3), AS_TIME]
"""What a kernel, a message or a step costs besides its work."""

Timeout = Annotated[float, Field(ge=1e-3, le=1e7), AS_TIME]
"""Seconds to wait before giving up; the upper bound is some four months."""

Share = Annotated[float, Field(ge=0, le=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Part = Annotated[float, Field(ge=1e-4, le=10)]
"""The part of a nominal rate that is reached; above 1 where a data sheet says too little."""

Factor = Annotated[float, Field(ge=1e-3, le=1e3)]
Amount = Annotated[float, Field(ge=0, le=1e6)]
"""How often a tensor is passed over, or how many bytes are moved for an element."""

Hyper = Annotated[float, Field(ge=0, le=1e6)]
PositiveHyper = Annotated[float, Field(ge=1e-30, le=1e6)]
DType = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]


class StrictModel(BaseModel):
    """A table of a job file or a preset: no unknown key, no conversion of types, never edited."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, protected_namespaces=(), allow_inf_nan=False
    )

    def __repr_args__(self) -> Iterator[tuple[str, object]]:
        """What is not the default; tables that have a name by it, and long texts cut."""
        for key, field in type(self).model_fields.items():
            value = getattr(self, key)
            if field.is_required() or value != field.get_default(call_default_factory=True):
                name = getattr(value, "name", None) if isinstance(value, StrictModel) else None
                yield key, shorten(value, 60) if isinstance(value, str) else name or value


def fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    """Keys of the table at `path` below a model; [] where there is no such table."""
    for key in path:
        field = model.model_fields.get(key)
        candidates = [field.annotation, *get_args(field.annotation)] if field else []
        tables = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not tables:
            return []
        model = tables[0]
    return list(model.model_fields)
