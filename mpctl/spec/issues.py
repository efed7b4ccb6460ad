"""What pydantic says of a job, in the words of a job file: one issue a cause, with a way out."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from mpctl.errors import InputError, Issue
from mpctl.spec.model import DERIVED
from mpctl.spec.names import nearest, value_hint
from mpctl.spec.not_planned import kind_of_key, not_planned

LONGEST_VALUE = 60


class SchemaError(InputError):
    """What the schema refuses. locations: pydantic's type of each error, with its key's path."""

    def __init__(self, error: ValidationError) -> None:
        details = _joined([dict(detail) for detail in error.errors(include_url=False)])
        told: list[dict[str, Any]] = []
        experts: list[dict[str, Any]] = []
        for detail in details:
            (experts if _kind(detail) else told).append(detail)
        issues = [_issue_of(d) for d in told if not _is_consequence(d)]
        super().__init__([*_not_planned(experts), *issues])
        self.locations = [(detail["type"], _path(detail)) for detail in details]


def _name(detail: dict[str, Any]) -> str:
    return ".".join(map(str, _path(detail)))


def _joined(details: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One error at the key where pydantic has one for `true or false` and one for the words beside
    it: `model.qk_norm.bool` and `model.qk_norm.literal['width']` become `model.qk_norm`."""
    flags = {detail["loc"][:-1] for detail in details if detail["type"] == "bool_type"}
    joined = []
    for detail in details:
        key, branch = detail["loc"][:-1], str(detail["loc"][-1])
        if key in flags and branch.startswith("literal["):
            words = detail["msg"].removeprefix("Input should be ")
            before = "true, false, " if " or " in words else "true, false or "
            message = f"Input should be {before}{words}"
            joined.append({**detail, "loc": key, "msg": message})
        elif not (key in flags and branch == "bool"):
            joined.append(detail)
    return joined


def _kind(detail: dict[str, Any]) -> str | None:
    """What is not planned yet, where this is an unknown key that says so."""
    return kind_of_key(str(_path(detail)[-1])) if detail["type"] == "extra_forbidden" else None


def _not_planned(details: list[dict[str, Any]]) -> list[Issue]:
    """One issue for all keys of models that are not planned yet."""
    if not details:
        return []
    keys = list(map(_name, details))
    hint = "leave these keys out to plan the dense model of the other keys"
    names = [key.removeprefix("model.") for key in keys]
    return [not_planned([_kind(detail) or "" for detail in details], names, keys[0], hint)]


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
        hint = nearest(path, detail.get("input"))
        return Issue("unknown-key", where, "there is no such setting", hint)
    if detail["type"] == "missing":
        start = "; or start from a preset, --model gpt2" if path[0] == "model" else ""
        hint = f"give {where}{start}"
        return Issue("missing", where, "is required and was not given", hint)
    as_key = " as a key" if detail["loc"][-1] == "[key]" else ""
    message = detail["msg"][0].lower() + detail["msg"][1:]
    shown = _shown(detail.get("input"))
    legal = detail.get("ctx", {}).get("expected", "") if detail["type"] == "literal_error" else ""
    hint = str(detail.get("ctx", {}).get("hint", ""))
    if legal:
        hint = value_hint(where, detail.get("input"), re.findall(r"'([^']*)'", legal))
    return Issue("bad-value", where, f"{shown} is not allowed{as_key}: {message}", hint)


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and value.bit_length() > 128:  # its digits may be past counting
        return f"an integer of {value.bit_length()} bits"
    text = "null" if value is None else repr(value)  # as JSON, which alone has it, writes it
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
