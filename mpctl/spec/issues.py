"""What pydantic says of a job, in the words of a job file: one issue a cause, with a way out."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from mpctl.errors import InputError, Issue
from mpctl.spec.job import JobSpec
from mpctl.spec.model import DERIVED
from mpctl.spec.presets import PRESET_TABLES

LONGEST_VALUE = 60


class SchemaError(InputError):
    """Keys that the schema refuses, and where they stand: (pydantic's type, path)."""

    def __init__(self, error: ValidationError) -> None:
        details = [dict(detail) for detail in error.errors(include_url=False)]
        super().__init__(_issue_of(d) for d in details if not _is_consequence(d))
        self.places = [(detail["type"], _path(detail)) for detail in details]


def _path(detail: dict[str, Any]) -> list[Any]:
    """Where it stands in the job; pydantic marks a bad key of a free table by one more part."""
    return [part for part in detail["loc"] if part != "[key]"]


def _is_consequence(detail: dict[str, Any]) -> bool:
    """A model key that follows from another one, whose own absence is what is reported."""
    path = _path(detail)
    return detail["type"] == "missing" and path[0] == "model" and path[-1] in DERIVED


def _issue_of(detail: dict[str, Any]) -> Issue:
    path = [str(part) for part in _path(detail)]
    where = ".".join(path)
    if detail["type"] == "extra_forbidden":
        return Issue("unknown-key", where, "there is no such setting", _nearest(path))
    if detail["type"] == "missing":
        return Issue("missing", where, "is required and was not given")
    as_key = " as a key" if detail["loc"][-1] == "[key]" else ""
    message = detail["msg"][0].lower() + detail["msg"][1:]
    shown = _shown(detail.get("input"))
    return Issue("bad-value", where, f"{shown} is not allowed{as_key}: {message}")


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and value.bit_length() > 128:  # its digits may be past counting
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _nearest(path: list[str]) -> str:
    """The legal keys nearest to an unknown one, elsewhere in the job if none is near here."""
    *table, key = path
    here = _keys_at(table)
    import difflib  # only where something is wrong

    near = difflib.get_close_matches(key, here, n=2)
    if near:
        return f"did you mean {' or '.join('.'.join([*table, name]) for name in near)}?"
    tables = [name for name in JobSpec.model_fields if key in _keys_at([name])]
    if tables:
        return f"did you mean {tables[0]}.{key}?"
    return f"keys here: {', '.join(here)}" if here else ""


def _keys_at(path: list[str]) -> list[str]:
    """Keys that a file may hold in the table at `path`."""
    model: Any = JobSpec
    for key in path:
        field = model.model_fields.get(key)
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
        models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not models:
            return []
        model = models[0]
    starts = ["preset"] if tuple(path) in PRESET_TABLES else []
    starts += ["hf_config"] if path == ["model"] else []
    return [*model.model_fields, *starts]
