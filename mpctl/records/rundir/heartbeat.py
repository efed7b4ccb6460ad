"""Progress reports of a program under `mpctl launch --program`, and the request that it stop.

A program that can import mpctl calls `heartbeat` and `stop_requested`; both do nothing elsewhere,
so that the same script runs below plain torchrun. One that cannot appends a line of JSON to the
file MPCTL_HEARTBEAT, or only touches it, and looks whether the file MPCTL_STOP exists:

    {"step": 12, "loss": 2.31, "tokens": 49152}

Whatever is appended is read as input from anybody (`parse_report`): of a line that is no report
nothing is used. A heartbeat of `heartbeat` is a store to memory that the rank shares with the agent
of its host (breadcrumb.py); only the ranks with MPCTL_RECORDS write their losses to the file, so
that not every rank writes to a network file system at every step.
"""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpctl.records.rundir.breadcrumb import is_stop_requested, note_heartbeat, rank_memory

HEARTBEAT, STOP, RECORDS = "MPCTL_HEARTBEAT", "MPCTL_STOP", "MPCTL_RECORDS"
"""Environment variables of a program's rank: the files above; 1 where its losses are recorded."""
OWN = ("step", "time", "loss", "tokens", "tokens_per_second", "step_seconds", "skipped")
"""Keys of a record that a report does not set as a figure of its own."""
MOST_FIGURES, LONGEST_NAME, LONGEST_LINE = 32, 64, 1 << 13
LARGEST = 2**53


def heartbeat(
    step: int | None = None, *, loss: float | None = None, tokens: int | None = None, **figures: float
) -> None:
    """Say that this rank is alive, and how far it is; to be called once a step, by every rank.

    step: the number of updates so far, from 1. loss: of the step, and tokens: trained on so far,
    by all ranks; figures: other numbers of the step, such as grad_norm. With a loss the step
    becomes a record in RUN/metrics.jsonl, which `mpctl status`, `mpctl show` and Prometheus read.
    The loss is kept of rank 0, and in a pipeline also of the first rank of the last stage. Numbers
    may be tensors of one element, and reading one from a GPU waits for it.

    It takes some 20 microseconds, raises nothing and does nothing in a process that `mpctl launch`
    did not start.
    """
    rank, file = os.environ.get("RANK", ""), os.environ.get(HEARTBEAT)
    if file is None or not rank.isdecimal():
        return
    is_heard = False
    with suppress(OSError, ValueError):
        doing = "" if step is None else f"step {step}"
        note_heartbeat(rank_memory(int(rank), os.environ), doing)
        is_heard = True
    is_recorded = loss is not None and step is not None and os.environ.get(RECORDS) == "1"
    with suppress(OSError, ValueError, TypeError):
        if is_recorded:
            numbers = {"loss": loss, "tokens": tokens, **figures}
            found = {name: _number(n) for name, n in numbers.items() if n is not None}
            line = json.dumps({"step": int(step or 0), "time": time.time(), **found})
            with Path(file).open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")
        elif not is_heard:
            os.utime(file)


def stop_requested() -> bool:
    """Whether the run is to stop: time to save and to end with exit code 0, within
    `launch.stop_seconds`. Ranks may see it one step apart from each other, so they have to agree
    before they save together. False in a process that `mpctl launch` did not start."""
    rank = os.environ.get("RANK", "")
    if HEARTBEAT not in os.environ or not rank.isdecimal():
        return False
    with suppress(OSError, ValueError):
        if is_stop_requested(rank_memory(int(rank), os.environ)):
            return True
    return Path(os.environ.get(STOP, os.devnull + "/none")).exists()


def _number(value: Any) -> float:
    """A number, also of a tensor of one element."""
    return float(value.item() if hasattr(value, "item") else value)


@dataclass(frozen=True)
class StepReport:
    """Report of a program on a step. time: seconds since 1970, None if not given; loss: None if
    missing or not finite; tokens: so far; figures: other numbers by name."""

    step: int
    time: float | None = None
    loss: float | None = None
    tokens: int | None = None
    figures: dict[str, float] = field(default_factory=dict)


def parse_report(line: bytes) -> StepReport | None:
    """The report in a line of a heartbeat file; None for any other line."""
    try:
        found = json.loads(line) if len(line) <= LONGEST_LINE else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    numbers = {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= LARGEST
        and math.isfinite(value)
    }
    step = numbers.get("step", 0.0)
    if step < 1 or step != int(step):
        return None
    tokens = numbers.get("tokens", -1.0)
    figures = {
        name: value
        for name, value in numbers.items()
        if name not in OWN and name.isidentifier() and len(name) <= LONGEST_NAME
    }
    return StepReport(
        int(step),
        numbers.get("time"),
        numbers.get("loss"),
        int(tokens) if tokens >= 0 else None,
        dict(list(figures.items())[:MOST_FIGURES]),
    )
