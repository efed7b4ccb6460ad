"""The report of a bench, schema mpctl.bench/1: what was measured, where, and by which command.

Every bench writes the same envelope around rows of its own. A row has a name that no other row of
the report has, and the seconds by which `mpctl bench compare` tells two reports apart: the median
of its rounds, the shortest and the longest. All other keys are the bench's; a value is a number, a
text, a truth value, None, or a table of those.

By hand, three rounds of 0.5, 0.3 and 0.4 s: seconds 0.4, seconds_min 0.3, seconds_max 0.5.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median
from typing import Literal

from typing_extensions import (  # pydantic needs it to validate them before Python 3.12
    ReadOnly,
    TypedDict,
)

from mpctl.launch.control.host_checks import shown
from mpctl.launch.node.facts import HostFacts, processor_name
from mpctl.launch.node.machine import this_machine
from mpctl.units import plural

SCHEMA: Literal["mpctl.bench/1"] = "mpctl.bench/1"
BenchName = Literal[
    "scaling", "collectives", "kernels", "machine", "verify", "tensor-modes", "trace"
]


class BenchEnvironment(TypedDict):
    """Where and with what the figures were measured. load_at_start: the load average of the last
    minute."""

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
    """Seconds over the rounds of one row: the median, the shortest, the longest; rounds: how many
    there were."""

    seconds: float
    seconds_min: float
    seconds_max: float
    rounds: int


class BenchRow(Spread):
    """What every row of a report has. name: unlike those of all other rows of the report, the same
    when the bench is run again."""

    name: str


class BenchEnvelope(TypedDict):
    """What every report has beside its `results` (a list of rows) and its `findings` (a table of
    what follows from all rows together).

    bench: the subcommand; job: its name, None where no job is involved; is_complete: false after
    Ctrl-C, or where the budget ended before every round; command: as typed.
    """

    schema: Literal["mpctl.bench/1"]
    bench: BenchName
    job: str | None
    is_complete: bool
    environment: BenchEnvironment
    command: str


class BenchReport(BenchEnvelope):
    """Any bench's report, by what all rows have."""

    results: ReadOnly[Sequence[BenchRow]]


def spread(seconds: Sequence[float]) -> Spread:
    """Median, shortest and longest of the rounds.

    >>> spread([0.5, 0.3, 0.4])["seconds"]
    0.4
    """
    return {"seconds": median(seconds), "seconds_min": min(seconds), "seconds_max": max(seconds),
            "rounds": len(seconds)}  # fmt: skip


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
        "mpctl": version("mpctl"),
    }


def environment_on(environment: BenchEnvironment, hosts: Sequence[HostFacts]) -> BenchEnvironment:
    """The environment of what ran on these hosts: their names, processors and versions, and the
    cores and GPUs of all of them together. The same where no host is named. The load average is
    still that of the host where the command runs."""
    if not hosts:
        return environment
    processors = dict.fromkeys(host.processor or "unknown processor" for host in hosts)
    return {
        **environment,
        "host": shown([host.name for host in hosts]),
        "machine": ", ".join(processors),
        "cores": sum(host.machine.cores for host in hosts),
        "gpus": sum(host.machine.gpus for host in hosts),
        "python": hosts[0].python,
        "torch": hosts[0].torch,
        "mpctl": hosts[0].mpctl,
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
