"""Whether a preset's table holds what its kind may hold; what is wrong is told with the file.

The bundled presets are held by tests. One's own (presets.py) are checked where they are
used, so that an error names the file and not only the table of the job that it went into.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from mpctl.errors import InputError, Issue
from mpctl.spec.base import fields_at
from mpctl.spec.measures import TEXT_ERROR
from mpctl.spec.presets import PresetFile

LONGEST_VALUE = 60


def preset_issues(error: ValidationError, file: PresetFile, model: type[BaseModel]) -> list[Issue]:
    """An issue for each key of a preset that `model` refuses, at the file's path."""
    details = error.errors(include_url=False)
    return [_issue(dict(detail), file, model) for detail in details]


def _issue(detail: dict[str, Any], file: PresetFile, model: type[BaseModel]) -> Issue:
    path = [str(part) for part in detail["loc"]]
    where, name = str(file.path), ".".join(path)
    if detail["type"] == "missing":
        return Issue("bad-preset", where, f"{name} is required and is not there", f"add {name}")
    if detail["type"] == "extra_forbidden":
        hint = f"keys there: {', '.join(fields_at(model, path[:-1]))}"
        return Issue("bad-preset", where, f"{name}: there is no such key", hint)
    message = detail["msg"][0].lower() + detail["msg"][1:]
    if detail["type"] == TEXT_ERROR:
        message = f"{str(detail['input'])[:LONGEST_VALUE]!r}: {message}"
    hint = detail.get("ctx", {}).get("hint") or f"mend {name} in the file"
    return Issue("bad-preset", where, f"{name}: {message}", hint)


def require_valid(file: PresetFile, table: dict[str, Any], model: type[BaseModel]) -> None:
    """Raises InputError where a preset's expanded table holds a key or a value that no job may.

    What is missing is left to the job, which may give it itself.
    """
    try:
        model.model_validate(table)
    except ValidationError as error:
        issues = [
            _issue(dict(detail), file, model)
            for detail in error.errors(include_url=False)
            if detail["type"] != "missing"
        ]
        if issues:
            raise InputError(issues) from None
