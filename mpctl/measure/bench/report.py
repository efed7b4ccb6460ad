"""The report of a bench, schema mpctl.bench/2, and the folder that it is written to.

Every bench writes the same envelope around its rows. A row has a name that is unique in the report,
and the seconds that `mpctl bench compare` compares: the median of its rounds, the shortest and the
longest. All other keys depend on the bench; a value is a number, a text, a boolean, None, or a
table of those.

OUT/ .mpctl-bench    marks the folder as a bench's
     report.json     schema mpctl.bench/2, replaced atomically after every round
     report.csv      its rows
     report.html, *.png, *.svg    page and pictures of the report
     data/N/         prepared data that runs of the bench share
     CASE-rN/        a run directory for each round of a case
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import ReadOnly, TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl import __version__
from mpctl.core.durable import write_whole
from mpctl.core.errors import InputError, Issue
from mpctl.core.records import flat
from mpctl.core.units import few_text, plural
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.marker import is_launched
from mpctl.run.hosts.machine import HostFacts, processor_name, this_machine

SCHEMA: Literal["mpctl.bench/2"] = "mpctl.bench/2"
BenchName = Literal["scaling", "collectives", "kernels", "machine", "verify", "tensor-modes", "trace"]


Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]  # thirty years


class BenchEnvironment(TypedDict):
    """The hosts and software versions of the measurement. load_at_start: the load average of the
    last minute."""

    date: str
    host: str
    machine: str
    cores: int
    gpus: int
    load_at_start: float
    python: str
    torch: str
    mpctl: str


class Spread(TypedDict):
    """Seconds over the rounds of one row: the median, the shortest, the longest; rounds: their
    number."""

    seconds: Seconds
    seconds_min: Seconds
    seconds_max: Seconds
    rounds: Annotated[int, Field(ge=1)]


class BenchRow(Spread):
    """The keys of every row of a report. name: unique in the report, and the same when the bench is
    run again."""

    name: Annotated[str, Field(min_length=1, max_length=500)]


class BenchEnvelope(TypedDict):
    """The keys of every report in addition to its `results` (a list of rows) and its `findings` (a
    table of figures of all rows together).

    bench: the subcommand; job: its name, None where no job is involved; is_complete: false after
    Ctrl-C, or where the budget ended before every round; command: as typed.
    """

    schema: Literal["mpctl.bench/2"]
    bench: BenchName
    job: str | None
    is_complete: bool
    environment: BenchEnvironment
    command: str


class BenchReport(BenchEnvelope):
    """Any bench's report, with the keys that all rows have."""

    results: ReadOnly[Sequence[BenchRow]]
    findings: ReadOnly[Mapping[str, object]]


def spread(seconds: Sequence[float]) -> Spread:
    """Median, shortest and longest of the rounds.

    >>> spread([0.5, 0.3, 0.4])["seconds"]
    0.4
    """
    return {
        "seconds": median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "rounds": len(seconds),
    }


def bench_environment() -> BenchEnvironment:
    """This machine and the versions of the software, now."""
    machine = this_machine()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "machine": processor_name(),
        "cores": machine.cores,
        "gpus": machine.gpus,
        "load_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        "mpctl": __version__,
    }


def environment_on(environment: BenchEnvironment, hosts: Sequence[HostFacts]) -> BenchEnvironment:
    """The environment of runs on these hosts: their names, processors and versions, and the cores
    and GPUs of all of them together. Unchanged without hosts. The load average is still that of the
    host where the command runs."""
    if not hosts:
        return environment
    processors = dict.fromkeys(host.processor or "unknown processor" for host in hosts)
    return {
        **environment,
        "host": few_text([host.name for host in hosts]),
        "machine": ", ".join(processors),
        "cores": sum(host.machine.cores for host in hosts),
        "gpus": sum(host.machine.gpus for host in hosts),
        "python": hosts[0].python,
        "torch": hosts[0].torch,
        "mpctl": hosts[0].mpctl,
    }


def envelope(
    bench: BenchName,
    job: str | None,
    environment: BenchEnvironment,
    command: str,
    *,
    is_complete: bool,
    hosts: Sequence[HostFacts] = (),
) -> BenchEnvelope:
    """A report without its rows and findings. hosts: those of the ranks, none where the bench ran
    on the machine of its environment."""
    return {
        "schema": SCHEMA,
        "bench": bench,
        "job": job,
        "is_complete": is_complete,
        "environment": environment_on(environment, hosts),
        "command": command,
    }


def load_warnings(environment: BenchEnvironment) -> list[str]:
    """A warning when other programs were using the cores."""
    load, cores = environment["load_at_start"], environment["cores"]
    if load <= cores:
        return []
    return [
        f"the load average is {load:.1f} on {plural(cores, 'core')}: other programs use them too, "
        "so these figures are too slow and vary"
    ]


BENCH_MARKER, REPORT, TABLE, DATA = ".mpctl-bench", "report.json", "report.csv", "data"
WRITTEN = ("report.*", "*.png", "*.svg", "presets/*/*.toml")
"""The files of a bench in addition to run directories, as patterns."""
FAMILY = SCHEMA.split("/")[0]  # older versions wrote mpctl.bench.scaling/1
READ_SCHEMAS = (f"{FAMILY}/1", SCHEMA)  # 1: `bench collectives` called the group dp_cp dp


def check_folder(out: Path, *, overwrite: bool) -> Iterator[Issue]:
    """An issue when the folder contains something that this bench may not replace."""
    if not _is_occupied(out):
        return
    if not out.is_dir():
        yield Issue("bench-no-folder", "--out", f"{out} is a file", "name a folder")
    elif not overwrite:
        yield Issue(
            "bench-occupied",
            "--out",
            f"{out} already contains {_what(out)}",
            "use --overwrite to replace it, or another --out",
        )
    elif not _is_bench(out):
        yield Issue(
            "bench-foreign", "--out", f"{out} was not written by mpctl bench; nothing was removed", "use another --out"
        )


def take_folder(out: Path) -> None:
    """Remove the files of an earlier bench and mark the folder as a bench's. Raises InputError when
    it cannot be written."""
    try:
        if _is_occupied(out):
            _clear(out)
        out.mkdir(parents=True, exist_ok=True)
        (out / BENCH_MARKER).write_text("", "utf-8")
    except OSError as error:
        raise _cannot_write(out, error) from None


def _cannot_write(out: Path, error: OSError) -> InputError:
    message = f"{out} cannot be written: {error.strerror or error}"
    return InputError.of("bench-unwritable", "--out", message, "name a folder that can be written")


def check_redrawn(out: Path, *, is_own: bool, overwrite: bool) -> Iterator[Issue]:
    """An issue when a report may not be written to a folder. is_own: it was read from there, so
    that it replaces itself; a folder that no bench wrote contains files of others."""
    if is_own and not _is_bench(out):
        yield Issue("bench-foreign", "--out", f"{out} was not written by mpctl bench", "name a new folder by --out")
    elif not is_own:
        yield from check_folder(out, overwrite=overwrite)


def save_report(out: Path, report: BenchReport) -> None:
    """Write OUT/report.json and OUT/report.csv; OUT is made where it is missing. Raises InputError
    when they cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / REPORT, json.dumps(report, indent=1) + "\n")
        write_whole(out / TABLE, csv_text(report["results"]))
    except OSError as error:
        raise _cannot_write(out, error) from None


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV: a column for each key of any row, `sizes.tp` for a key of an inner table.

    >>> csv_text([{"name": "a", "sizes": {"tp": 2}}, {"name": "b", "wrong": 0}])
    'name,sizes.tp,wrong\\r\\na,2,\\r\\nb,,0\\r\\n'
    """
    tables = [dict(flat(row)) for row in rows]
    columns = dict.fromkeys(key for table in tables for key in table)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(columns), restval="")
    writer.writeheader()
    writer.writerows(tables)
    return stream.getvalue()


def _clear(out: Path) -> None:
    for pattern in WRITTEN:
        for path in out.glob(pattern):
            path.unlink(missing_ok=True)
    if not (out / DATA).is_symlink():
        shutil.rmtree(out / DATA, ignore_errors=True)
    for path in out.glob("*-r*"):
        if path.is_dir() and not path.is_symlink() and is_launched(path):
            RunDir(path).abandon()


def _is_occupied(out: Path) -> bool:
    return out.exists() and (not out.is_dir() or any(out.iterdir()))


def _is_bench(out: Path) -> bool:
    return (out / BENCH_MARKER).is_file() or _has_report(out)


def _what(out: Path) -> str:
    return "a bench's report" if _has_report(out) else "files"


def _has_report(out: Path) -> bool:
    try:
        report = json.loads((out / REPORT).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(report, dict) and str(report.get("schema")).startswith(FAMILY)
