"""Reports of benches, read back: files that others may have written, so that nothing is trusted.

The envelope is strict: schema `mpctl.bench/2`, all keys of the environment, rows with names that
differ and with seconds in order (shortest <= median <= longest). Keys that a bench adds to its rows
and findings are kept as they are; who reads one takes it by `number_of` or `text_of`.

By hand, a row whose `busbw` is the text "fast": number_of(row, "busbw") is None.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mpctl.bench.report import (
    FAMILY,
    READ_SCHEMAS,
    REPORT,
    SCHEMA,
    BenchEnvironment,
    BenchName,
    BenchReport,
)
from mpctl.errors import InputError, Issue, attempt
from mpctl.rundir.group_names import group_name

MOST_BYTES = 64 * 2**20
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]  # thirty years
Name = Annotated[str, Field(min_length=1, max_length=500)]
MEASURE_AGAIN = "measure again with this version of mpctl"
NAME_ONE = "name a report.json of mpctl bench, or its folder"


class SavedRow(BaseModel):
    """What is read of a row of any bench (BenchRow); the bench's own keys are kept beside it."""

    model_config = ConfigDict(extra="allow")

    name: Name
    seconds: Seconds
    seconds_min: Seconds
    seconds_max: Seconds
    rounds: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _in_order(self) -> SavedRow:
        if not self.seconds_min <= self.seconds <= self.seconds_max:
            raise ValueError(
                f"seconds {self.seconds:g} lie outside of seconds_min {self.seconds_min:g} and "
                f"seconds_max {self.seconds_max:g}"
            )
        return self


class SavedReport(BaseModel):
    """What is read of a report of any bench (BenchReport)."""

    bench: BenchName
    job: str | None
    is_complete: bool
    environment: BenchEnvironment
    command: str
    results: Annotated[list[SavedRow], Field(max_length=100_000)]
    findings: dict[str, Any]

    @model_validator(mode="after")
    def _names_differ(self) -> SavedReport:
        counts = Counter(row.name for row in self.results)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"several rows are named {twice[0]!r}")
        return self


def report_path(path: Path) -> Path:
    """The file of a report: the path, or report.json in it where it is a folder."""
    return path / REPORT if path.is_dir() else path


def read_report(path: Path, where: str) -> BenchReport:
    """The report in a file, or in a bench's folder.

    where: the argument that named it, for messages. Raises InputError for a file that cannot be
    read, is larger than MOST_BYTES or no JSON, has another schema, or lacks what every report has.
    """
    file = report_path(path)
    document = _document(file, where)
    schema = document.get("schema")
    if schema not in READ_SCHEMAS:
        told = (
            "that of an older version" if str(schema).startswith(f"{FAMILY}.") else f"not {SCHEMA}"
        )
        message = f"{file} has the schema {_short(schema)}, {told}"
        raise InputError.of("bench-schema", where, message, f"{MEASURE_AGAIN}; {NAME_ONE}")
    try:
        SavedReport.model_validate(document, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the report"
        message = f"{file}: {key}: {first['msg']}, not {_short(first['input'])}"
        raise InputError.of("bench-report", where, message, MEASURE_AGAIN) from None
    if schema != SCHEMA:
        document |= {"schema": SCHEMA, "findings": _renamed(document["findings"]),
                     "results": _renamed(document["results"])}  # fmt: skip
    return cast(BenchReport, document)  # checked above; the bench's own keys stay


def read_reports(named: Mapping[str, Path]) -> list[BenchReport]:
    """The reports in several files by the arguments that named them. Raises InputError with the
    issues of all files at once."""
    reports: list[BenchReport] = []
    issues: list[Issue] = []
    for where, path in named.items():
        report = attempt(issues, partial(read_report, path, where))
        if report is not None:
            reports.append(report)
    if issues:
        raise InputError(issues)
    return reports


def number_of(table: object, *keys: str) -> float | None:
    """The finite number under a key, or under a key of an inner table; None for anything else.

    >>> number_of({"sizes": {"tp": 2}}, "sizes", "tp"), number_of({"mfu": "high"}, "mfu")
    (2.0, None)
    """
    value = _at(table, keys)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return found if isfinite(found) else None


def text_of(table: object, *keys: str) -> str:
    """The text under a key, or under a key of an inner table; empty for anything else."""
    value = _at(table, keys)
    return value if isinstance(value, str) else ""


def _renamed(value: Any) -> Any:
    """Rows and findings of mpctl.bench/1 with the groups' names of today: a collective's axis is
    a part of its row's name, `all_reduce dp2 float32 1024 gloo`."""
    if isinstance(value, list):
        return [_renamed(item) for item in value]
    if not isinstance(value, dict):
        return value
    renamed = {key: _renamed(item) for key, item in value.items()}
    if value.get("axis") == "dp":
        renamed["axis"] = group_name("dp")
        if isinstance(name := value.get("name"), str):
            renamed["name"] = name.replace(" dp", " " + group_name("dp"), 1)
    return renamed


def _at(table: object, keys: tuple[str, ...]) -> object:
    for key in keys:
        table = table.get(key) if isinstance(table, Mapping) else None
    return table


def _document(file: Path, where: str) -> dict[str, Any]:
    document = _parsed(_text(file, where), file, where)
    if isinstance(document, dict):
        return document
    raise InputError.of("bench-report", where, f"{file} does not hold a JSON object", NAME_ONE)


def _text(file: Path, where: str) -> str:
    try:
        if (size := file.stat().st_size) > MOST_BYTES:
            message = f"{file} has {size:,} bytes, more than {MOST_BYTES:,}"
            raise InputError.of("bench-report", where, message, NAME_ONE)
        return file.read_text("utf-8")
    except OSError as error:
        message = f"{file}: {error.strerror or error}"
        raise InputError.of("bench-unreadable", where, message, NAME_ONE) from None
    except UnicodeDecodeError:
        raise InputError.of("bench-report", where, f"{file} is not UTF-8", NAME_ONE) from None


def _parsed(text: str, file: Path, where: str) -> object:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        message = f"{file} is not valid JSON: {_short(str(error) or 'nested too deeply')}"
        raise InputError.of("bench-report", where, message, NAME_ONE) from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, str) else value
    return text if len(text) <= 60 else f"{text[:57]}..."
