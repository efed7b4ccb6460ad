"""Slurm's time limits. sbatch reads minutes, minutes:seconds, hours:minutes:seconds, days-hours,
days-hours:minutes and days-hours:minutes:seconds; sinfo and squeue print the last forms."""

from __future__ import annotations

import re
from math import inf

from mpctl.errors import InputError

UNLIMITED = {"infinite", "unlimited", "-1"}
WITH_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?")
WITHOUT_DAYS = re.compile(r"(?:(\d+):)??(\d+)(?::(\d+))?")


def time_limit_seconds(text: str, where: str = "launch.slurm.time") -> float:
    """Seconds of a time limit, infinity for `UNLIMITED`. Raises InputError for other text.

    >>> time_limit_seconds("90"), time_limit_seconds("1-12:30")
    (5400.0, 131400.0)
    """
    if text.lower() in UNLIMITED:
        return inf
    if match := WITH_DAYS.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if match := WITHOUT_DAYS.fullmatch(text):
        hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float((hours * 60 + minutes) * 60 + seconds)
    hint = "write it as sbatch does: 30 (minutes), 12:00:00 or 2-00:00:00"
    raise InputError.of("slurm-time", where, f"{text!r} is not a time limit", hint)


def time_limit_text(seconds: float) -> str:
    """`131400` -> `1-12:30:00`, `5400` -> `1:30:00`; infinity -> `unlimited`."""
    if seconds == inf:
        return "unlimited"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02}:{second:02}"
    return f"{days}-{clock}" if days else clock
