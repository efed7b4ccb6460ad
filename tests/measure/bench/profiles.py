"""Profiles made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpctl.measure.bench.trace import RunProfile, clock_offsets
from mpctl.records.rundir.profile_files import ProfiledStep, ProfileEvent, profile_path


def event(name: str, began: float, ended: float, **more: Any) -> ProfileEvent:
    made: Any = {"name": name, "began": began, "ended": ended, **more}
    return made


def line(rank: int, step: int, *events: ProfileEvent, **more: Any) -> ProfiledStep:
    """A line of one of 2 ranks, each a stage of its own."""
    made: Any = {
        "rank": rank,
        "world_size": 2,
        "coords": {"tp": 0, "pp": rank},
        "host": "a",
        "clock": "a",
        "step": step,
        "events": list(events),
        **more,
    }
    return made


def profile_of(*lines: ProfiledStep) -> RunProfile:
    steps: dict[int, dict[int, ProfiledStep]] = {}
    for one in lines:
        steps.setdefault(one["step"], {})[one["rank"]] = one
    return RunProfile(steps, clock_offsets(steps))


def write(run: Path, *lines: ProfiledStep) -> None:
    for one in lines:
        path = profile_path(run, one["rank"])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as stream:
            stream.write(json.dumps(one) + "\n")


def two_stages(step: int = 3, at: float = 100.0) -> tuple[ProfiledStep, ProfiledStep]:
    """One micro batch through two stages: F of 1 s, a message, F and B of 1 and 2 s, a message, B
    of 2 s, the status; stage 0 waits 3.5 s for the gradient."""
    sent = {"axis": "pp", "bytes": 8, "dtype": "float32"}
    place = {"microbatch": 0, "chunk": 0}
    first = line(
        0,
        step,
        event("step", at, at + 8),
        event("forward", at, at + 1, **place),
        event("data", at, at + 0.25),
        event("send", at + 1, at + 1.25, phase="start", **sent, of="forward", **place, peer=1),
        event("receive", at + 1.25, at + 1.5, phase="start", **sent, of="backward", **place, peer=1),
        event("receive", at + 1.5, at + 5, phase="wait", **sent, started=at + 1.25),
        event("backward", at + 5, at + 7, **place),
        event("optimizer", at + 7, at + 7.5),
        event("status", at + 7.5, at + 8),
        event("all_reduce", at + 7.5, at + 8, phase="start", axis="world", bytes=32, dtype="float64"),
        event("validation", at + 8, at + 20),
    )
    second = line(
        1,
        step,
        event("step", at, at + 8),
        event("forward", at + 1.5, at + 2.5, **place),
        event("backward", at + 2.5, at + 4.5, **place),
        event("all_reduce", at + 5, at + 7.75, phase="start", axis="world", bytes=32, dtype="float64"),
    )
    return first, second
