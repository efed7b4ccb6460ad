"""The report of a scaling bench: schema mpctl.bench.scaling/1."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Literal, TypedDict

from mpctl.bench.folder import REPORT
from mpctl.bench.scaling import ScalingRow
from mpctl.launch.node.machine import this_machine
from mpctl.units import plural


class BenchEnvironment(TypedDict):
    """Where and with what the figures were measured. load_at_start: the load average of the last
    minute."""

    date: str
    machine: str
    cores: int
    gpus: int
    load_at_start: float
    python: str
    torch: str
    mpctl: str


class ScalingReport(TypedDict):
    """What `mpctl bench scaling --json` prints, and OUT/report.json. steps_timed: of each case."""

    schema: Literal["mpctl.bench.scaling/1"]
    job: str | None
    results: list[ScalingRow]
    steps_timed: int
    environment: BenchEnvironment
    command: str


def bench_environment() -> BenchEnvironment:
    """This machine and the versions of the software, now."""
    machine = this_machine()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "cores": machine.cores,
        "gpus": machine.gpus,
        "load_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        "mpctl": version("mpctl"),
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


def write_report(out: Path, report: ScalingReport) -> None:
    """Write OUT/report.json. Raises OSError."""
    (out / REPORT).write_text(json.dumps(report, indent=1) + "\n", "utf-8")
