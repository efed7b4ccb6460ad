"""Two reports of one bench, row by row: which rows became slower.

Rows are matched by name. A row is a regression where its median grew by more than the threshold and
all rounds of B were slower than all of A; faster is the reverse. A change
beyond the threshold whose rounds overlap is called noise, and is no regression.

At a threshold of 10 %, A 1.0 s (0.9 to 1.1), B 1.2 s (1.15 to 1.3) is a regression; with rounds
from 1.05 s on in B it is noise, as 1.05 < 1.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import geometric_mean
from typing import Literal

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.errors import InputError
from mpctl.measure.bench.report import BenchEnvironment, BenchReport, BenchRow, load_warnings

SCHEMA: Literal["mpctl.bench-compare/1"] = "mpctl.bench-compare/1"
Verdict = Literal["slower", "faster", "noise", "same"]
SHORTEST = 1e-9  # seconds, so that a part without any time has a ratio too
SAME_MACHINE: tuple[Literal["host", "machine", "cores", "gpus"], ...] = ("host", "machine", "cores", "gpus")
SAME_SOFTWARE: tuple[Literal["python", "torch", "mpctl"], ...] = ("python", "torch", "mpctl")


class ComparedRow(TypedDict):
    """A row of both reports. ratio: seconds of B over those of A; slower, faster: beyond threshold
    and spread; noise: beyond the threshold, but not the spread; same: within the threshold."""

    name: str
    seconds_a: float
    seconds_b: float
    ratio: float
    verdict: Verdict


class Comparison(TypedDict):
    """Output of `mpctl bench compare --json`. threshold: in percent; ratio: the geometric mean over the
    rows; only_in_a, only_in_b: names of rows; warnings: reasons other than the code why the reports may
    differ."""

    schema: Literal["mpctl.bench-compare/1"]
    bench: str
    threshold: float
    ratio: float
    regressions: int
    rows: list[ComparedRow]
    only_in_a: list[str]
    only_in_b: list[str]
    warnings: list[str]


def compare_reports(a: BenchReport, b: BenchReport, threshold: float) -> Comparison:
    """Report B against the older report A; threshold: in percent.

    Raises InputError for reports of different benches, and where no row has the same name in both.
    """
    if a["bench"] != b["bench"]:
        raise InputError.of(
            "bench-differs",
            "B",
            f"it is of bench {b['bench']}, and A of bench {a['bench']}",
            "compare two reports of one bench",
        )
    before, after = _rows_by_name(a), _rows_by_name(b)
    rows = [_compared(before[name], after[name], threshold) for name in before if name in after]
    if not rows:
        raise InputError.of(
            "bench-nothing-common",
            "B",
            f"none of its {len(after)} rows has the name of one of A's {len(before)}",
            "measure both by the same command",
        )
    return {
        "schema": SCHEMA,
        "bench": a["bench"],
        "threshold": threshold,
        "ratio": geometric_mean(row["ratio"] for row in rows),
        "regressions": sum(row["verdict"] == "slower" for row in rows),
        "rows": rows,
        "only_in_a": [name for name in before if name not in after],
        "only_in_b": [name for name in after if name not in before],
        "warnings": list(_warnings(a, b)),
    }


def _rows_by_name(report: BenchReport) -> dict[str, BenchRow]:
    """The rows by name; one that took no time at all cannot be compared, as if it were missing."""
    return {row["name"]: row for row in report["results"] if row["seconds"] > 0}


def _compared(a: BenchRow, b: BenchRow, threshold: float) -> ComparedRow:
    return {
        "name": a["name"],
        "seconds_a": a["seconds"],
        "seconds_b": b["seconds"],
        "ratio": max(b["seconds"], SHORTEST) / max(a["seconds"], SHORTEST),
        "verdict": _verdict(a, b, 1 + threshold / 100),
    }


def _verdict(a: BenchRow, b: BenchRow, bound: float) -> Verdict:
    if b["seconds"] > bound * a["seconds"]:
        return "slower" if b["seconds_min"] > a["seconds_max"] else "noise"
    if a["seconds"] > bound * b["seconds"]:
        return "faster" if a["seconds_min"] > b["seconds_max"] else "noise"
    return "same"


def _warnings(a: BenchReport, b: BenchReport) -> Iterator[str]:
    where, there = a["environment"], b["environment"]
    yield from _differences("another machine", where, there, SAME_MACHINE)
    yield from _differences("other versions", where, there, SAME_SOFTWARE)
    if a["command"] != b["command"]:
        yield f"other commands: A by `{a['command']}`, B by `{b['command']}`"
    for name, report in (("A", a), ("B", b)):
        if not report["is_complete"]:
            yield f"{name} is not complete: it was interrupted, or its budget ended"
        for warning in load_warnings(report["environment"]):
            yield f"{name}: {warning}"
    if max(row["rounds"] for report in (a, b) for row in report["results"]) == 1:
        yield "one round each: the spread is not known, so that noise counts as slower or faster"


def _differences(
    words: str,
    a: BenchEnvironment,
    b: BenchEnvironment,
    keys: tuple[Literal["host", "machine", "cores", "gpus", "python", "torch", "mpctl"], ...],
) -> Iterator[str]:
    differing = [f"{key} {a[key]} and {b[key]}" for key in keys if a[key] != b[key]]
    if differing:
        yield f"{words}: {', '.join(differing)}"
