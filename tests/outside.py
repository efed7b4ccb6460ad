"""Published runs of systems that no preset was fitted to (recorded/outside_runs.json), and the
errors of their plans.

A row is a command line of `mpctl plan` and what its publication measured. Rows of one `system`
(a trainer on a cluster) are left out together. `soft` says what was assumed where a publication
leaves something open.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from mpctl.cli.options import FLAGS
from mpctl.plan.estimate.system import find_system
from mpctl.plan.planning.plan import Plan, load_plan
from mpctl.spec.load import parse_settings

RECORDED = Path(__file__).with_name("recorded")


class OutsideRun(NamedTuple):
    """A published run and its plan. seconds: of a published step; soft: what was assumed."""

    id: str
    system: str
    plan: Plan
    seconds: float
    soft: str

    @property
    def error(self) -> float:
        """(estimated - published) / published seconds of a step."""
        assert self.plan.estimate is not None
        return self.plan.estimate.time.total / self.seconds - 1

    @property
    def factor(self) -> float:
        """By how much everything was taken to last longer (plan/estimate/system.py)."""
        assert self.plan.estimate is not None
        layout = self.plan.estimate.layout
        return find_system(layout.job.cluster, layout.profile).factor

    @property
    def in_band(self) -> bool:
        """Whether the plan's band contains the published step."""
        assert self.plan.estimate is not None
        low, high = self.plan.estimate.time.low, self.plan.estimate.time.high
        return low <= self.seconds <= high


def read_rows() -> list[dict[str, Any]]:
    """The rows as they are recorded."""
    rows: list[dict[str, Any]] = json.loads((RECORDED / "outside_runs.json").read_text("utf-8"))["rows"]
    return rows


def settings_of(arguments: list[str]) -> dict[str, Any]:
    """The settings that arguments of `mpctl plan` name."""
    flags = {option: flag for flag in FLAGS for option in flag.option.split("/")}
    settings: dict[str, Any] = {}
    words = iter(word.replace("{clusters}", str(RECORDED / "clusters")) for word in arguments)
    for word in words:
        if word == "--set":
            settings |= parse_settings([next(words)])
        elif flags[word].type is bool:
            settings[flags[word].setting] = not word.startswith("--no-")
        else:
            settings[flags[word].setting] = flags[word].type(next(words))
    return settings


@cache
def outside_runs() -> tuple[OutsideRun, ...]:
    """Every row with its plan."""
    return tuple(_planned(row) for row in read_rows())


@cache
def outside_run(name: str) -> OutsideRun:
    """The row of this id with its plan."""
    return next(_planned(row) for row in read_rows() if row["id"] == name)


def _planned(row: dict[str, Any]) -> OutsideRun:
    plan = load_plan(None, settings_of(row["args"]))
    seconds = row["published"]
    if row["unit"] == "tok":
        tokens = plan.job.training.global_batch_size * plan.job.model.seq_length
        seconds = tokens / plan.require_legal().world_size / row["published"]
    return OutsideRun(row["id"], row["system"], plan, seconds, row.get("soft", ""))


def summary(runs: tuple[OutsideRun, ...] | list[OutsideRun]) -> tuple[float, float, float]:
    """Mean absolute error, bias (mean error), and the share in the band."""
    errors = [run.error for run in runs]
    return mean(map(abs, errors)), mean(errors), mean(run.in_band for run in runs)
