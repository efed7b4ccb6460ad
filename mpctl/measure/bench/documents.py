"""Reading reports of benches: files that others may have written, so that everything is validated.

Comparing two reports needs the parts that all benches have: the envelope, and rows with unique
names and with seconds in order (shortest <= median <= longest). Drawing a report needs every key of
its bench's rows and findings.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias, cast

from pydantic import Field, TypeAdapter, ValidationError

from mpctl.core.errors import InputError, Issue, attempt
from mpctl.measure.bench.collectives import CollectivesReport
from mpctl.measure.bench.kernels import KernelsReport
from mpctl.measure.bench.machine import MachineReport
from mpctl.measure.bench.report import (
    FAMILY,
    READ_SCHEMAS,
    REPORT,
    SCHEMA,
    BenchEnvelope,
    BenchName,
    BenchReport,
    BenchRow,
)
from mpctl.measure.bench.scaling import ScalingReport
from mpctl.measure.bench.tensor_modes import TensorModesReport
from mpctl.measure.bench.trace import TraceReport
from mpctl.measure.bench.verify import VerifyReport
from mpctl.records.rundir.group_names import group_name

MOST_BYTES = 64 * 2**20
LARGEST = 10**18  # of an integer
MEASURE_AGAIN = "measure again with this version of mpctl"
NAME_ONE = "name a report.json of mpctl bench, or its folder"


class CommonReport(BenchEnvelope):
    """The parts by which reports of any versions are compared."""

    results: Annotated[list[BenchRow], Field(max_length=100_000)]
    findings: dict[str, Any]


REPORTS: Mapping[BenchName, Any] = {
    "scaling": ScalingReport,
    "collectives": CollectivesReport,
    "kernels": KernelsReport,
    "machine": MachineReport,
    "verify": VerifyReport,
    "tensor-modes": TensorModesReport,
    "trace": TraceReport,
}


AnyReport: TypeAlias = (
    ScalingReport | CollectivesReport | KernelsReport | MachineReport | VerifyReport | TensorModesReport | TraceReport
)
"""A report of any bench."""


def report_path(path: Path) -> Path:
    """The file of a report: the path, or report.json in it where it is a folder."""
    return path / REPORT if path.is_dir() else path


def read_report(path: Path, where: str, *, complete: bool = False) -> BenchReport:
    """The report in a file, or in a bench's folder.

    where: the argument that named it, for messages; complete: with every key of its bench, so that
    it can be drawn. Raises InputError for a file that cannot be read, is larger than MOST_BYTES or
    no JSON, has another schema, or lacks a key.
    """
    file = report_path(path)
    document = _parsed(_text(file, where), file, where)
    if not isinstance(document, dict):
        raise InputError.of("bench-report", where, f"{file} does not hold a JSON object", NAME_ONE)
    if (schema := document.get("schema")) not in READ_SCHEMAS:
        is_older = str(schema).startswith(f"{FAMILY}.")
        which = "that of an older version" if is_older else f"not {SCHEMA}"
        message = f"{file} has the schema {_short(schema)}, {which}"
        raise InputError.of("bench-schema", where, message, f"{MEASURE_AGAIN}; {NAME_ONE}")
    if schema != SCHEMA:
        lists = {key: _renamed(document.get(key)) for key in ("findings", "results")}
        document = {**document, "schema": SCHEMA, **lists}
    try:
        text = json.dumps(document)
        TypeAdapter(CommonReport).validate_json(text, strict=True)
        _check_rows(document["results"])
        if complete:
            TypeAdapter(REPORTS[document["bench"]]).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the report"
        message = f"{file}: {key}: {first['msg']}, not {_short(first['input'])}"
        raise InputError.of("bench-report", where, message, MEASURE_AGAIN) from None
    except ValueError as error:
        raise InputError.of("bench-report", where, f"{file}: {error}", MEASURE_AGAIN) from None
    return cast(BenchReport, document)  # checked above; keys of later versions stay


def _check_rows(rows: list[BenchRow]) -> None:
    counts = Counter(row["name"] for row in rows)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"several rows are named {twice[0]!r}")
    for row in rows:
        if not row["seconds_min"] <= row["seconds"] <= row["seconds_max"]:
            raise ValueError(
                f"seconds {row['seconds']:g} of {row['name']} lie outside of seconds_min "
                f"{row['seconds_min']:g} and seconds_max {row['seconds_max']:g}"
            )


def _renamed(value: Any) -> Any:
    """Rows and findings of mpctl.bench/1 with the current names of groups: a collective's axis is a
    part of its row's name, `all_reduce dp2 float32 1024 gloo`."""
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


def read_reports(named: Mapping[str, Path]) -> list[BenchReport]:
    """The reports in several files by the arguments that named them. Raises InputError with the
    issues of all files together."""
    issues: list[Issue] = []
    reports = [attempt(issues, partial(read_report, path, where)) for where, path in named.items()]
    if issues:
        raise InputError(issues)
    return [report for report in reports if report is not None]


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
        return json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        message = f"{file} is not valid JSON: {_short(str(error) or 'nested too deeply')}"
        raise InputError.of("bench-report", where, message, NAME_ONE) from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(text: str) -> float:
    return number if isfinite(number := float(text)) else _refuse(text)


def _whole(text: str) -> int:
    return int(text) if len(text) < 20 and abs(int(text)) <= LARGEST else _refuse(text)


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, str) else value
    return text if len(text) <= 60 else f"{text[:57]}..."
