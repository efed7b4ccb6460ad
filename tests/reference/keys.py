"""The tables of a job file, key by key, from the models that read it."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mpctl.cli.options import FLAGS
from mpctl.spec.base import table_of
from mpctl.spec.job import JobSpec
from mpctl.spec.load import MODEL
from mpctl.spec.model import DERIVED
from mpctl.spec.presets import PRESET_TABLES
from tests.reference.types import NAMES, bounds_text, default_text, type_text


def job_tables(
    model: type[BaseModel] = JobSpec, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """Every table of a job with its path; () is the job itself."""
    yield path, model
    for name, field in model.model_fields.items():
        if inner := table_of(field):
            yield from job_tables(inner, (*path, name))


def keys_text() -> str:
    """A section for each table; one that repeats the keys of an earlier table names that table."""
    parts: list[str] = []
    told: dict[str, list[str]] = {}
    for path, model in job_tables():
        name = ".".join(path)
        title = f"### [{name}]" if path else "### The job itself"
        words = " ".join((model.__doc__ or "").strip().split("\n\n")[0].split())
        rows = [*_start_rows(path), *(_row(name, key, field) for key, field in model.model_fields.items())]
        same = next((other for other, theirs in told.items() if set(rows) <= set(theirs)), None)
        told[name] = rows
        parts += [title, words, _like(same, set(told[same]) - set(rows)) if same else "\n".join(rows)]
    return "\n\n".join(parts)


def _like(table: str, missing: set[str]) -> str:
    keys = ", ".join(f"`{key}`" for key in sorted(row.split("`")[1] for row in missing))
    return f"Keys of [{table}]{f', except {keys}' if keys else ''}."


def _start_rows(path: tuple[str, ...]) -> Iterator[str]:
    """What a table may start from, which no model holds."""
    if path in PRESET_TABLES:
        yield f"- `preset`: start from this preset of {PRESET_TABLES[path]}"
    if path == MODEL:
        yield "- `hf_config`: take the shape from this Hugging Face config"


def _row(table: str, key: str, field: FieldInfo) -> str:
    setting = f"{table}.{key}" if table else key
    flag = next((f.option for f in FLAGS if f.setting == setting), None)
    meaning = (field.description or "").removeprefix("whether ") + (f" (`{flag}`)" if flag else "")
    default = "" if table == "model" and key in DERIVED else default_text(field)
    kind = type_text(field.annotation, field.metadata)
    kind += ", or a preset" if tuple(setting.split(".")) in PRESET_TABLES else ""
    told = "" if kind == "string" or (default.startswith("`") and kind in NAMES.values()) else kind
    facts = "; ".join(filter(None, (told, bounds_text(field), default)))
    return f"- `{key}`{f' ({facts})' if facts else ''}: {meaning}"
