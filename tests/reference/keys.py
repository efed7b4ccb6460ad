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
from tests.reference.types import bounds_text, default_text, type_text

HEAD = "| key | type | default | bounds | meaning |\n|---|---|---|---|---|"


def job_tables(
    model: type[BaseModel] = JobSpec, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """Every table of a job with its path; () is the job itself."""
    yield path, model
    for name, field in model.model_fields.items():
        if inner := table_of(field):
            yield from job_tables(inner, (*path, name))


def keys_text() -> str:
    return "\n\n".join(_table_text(path, model) for path, model in job_tables())


def _table_text(path: tuple[str, ...], model: type[BaseModel]) -> str:
    name = ".".join(path)
    title = f"### [{name}]" if path else "### The job itself"
    words = (model.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
    rows = [HEAD, *_start_rows(path)]
    rows += [_row(name, key, field) for key, field in model.model_fields.items()]
    return f"{title}\n\n{' '.join(words.split())}\n\n" + "\n".join(rows)


def _start_rows(path: tuple[str, ...]) -> Iterator[str]:
    """What a table may start from, which no model holds."""
    if path in PRESET_TABLES:
        kind = PRESET_TABLES[path]
        yield f"| `preset` | string | absent |  | start from this preset of {kind} |"
    if path == MODEL:
        yield "| `hf_config` | string | absent |  | take the shape from this Hugging Face config |"


def _row(table: str, key: str, field: FieldInfo) -> str:
    setting = f"{table}.{key}" if table else key
    flag = next((f.option for f in FLAGS if f.setting == setting), None)
    meaning = field.description or ""
    if flag is not None:
        meaning += f" (`{flag.replace('/', '`, `')}`)"
    kind = type_text(field.annotation, field.metadata)
    kind += ", or a preset's name or file" if tuple(setting.split(".")) in PRESET_TABLES else ""
    default = "absent" if table == "model" and key in DERIVED else default_text(field)
    cells = [f"`{key}`", kind, default, bounds_text(field)]
    return f"| {' | '.join([*cells, meaning])} |"
