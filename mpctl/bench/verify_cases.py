"""The cases of `mpctl bench verify`: plans with forecasts that runs here can be held against.

A plan is refused that forecasts no step time, or that is of another kind of device than ranks would
run on: CPU cores say nothing about a plan of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from mpctl.bench.cases import RunCase
from mpctl.bench.verify_layouts import (
    file_name,
    layout_name,
    told_apart,
)
from mpctl.errors import InputError, Issue
from mpctl.launch.summary import plan_as_launched
from mpctl.planning.layout_settings import layout_of
from mpctl.planning.plan import Overrides, Plan
from mpctl.spec.launch import LAUNCHED_AS

PlanWith = Callable[[Overrides], Plan]
MEASURE_FIRST = "--cluster FILE with a preset of this machine, as `mpctl bench machine` writes it"


@dataclass(frozen=True)
class Wanted:
    """A layout to be verified. job: its job's name in titles, empty where all are of one job;
    make_plan: returns its legal plan or raises InputError."""

    job: str
    make_plan: Callable[[], Plan]


def wanted_layouts(plan_with: PlanWith, settings: Iterable[Overrides]) -> list[Wanted]:
    """A `Wanted` for each of these settings over one job's own. plan_with: plans it with them."""
    return [Wanted("", partial(plan_with, own)) for own in settings]


def verify_cases(wanted: Sequence[Wanted]) -> list[RunCase]:
    """A case for each, named by job and layout. What is wrong with one is raised by its make_plan,
    so that `plan_cases` reports the issues of all."""
    planned = [(each.job, _try(each.make_plan)) for each in wanted]
    titles = told_apart(_title(job, plan) for job, plan in planned)
    return [
        RunCase(file_name(title), _maker(plan), title)
        for title, (_, plan) in zip(titles, planned, strict=True)
    ]


def _try(make_plan: Callable[[], Plan]) -> Plan | InputError:
    try:
        return _require_forecast(make_plan())
    except InputError as error:
        return error


def _maker(plan: Plan | InputError) -> Callable[[], Plan]:
    def refuse() -> NoReturn:
        assert isinstance(plan, InputError)
        raise plan

    return refuse if isinstance(plan, InputError) else lambda: plan


def _title(job: str, plan: Plan | InputError) -> str:
    layout = "" if isinstance(plan, InputError) else layout_name(layout_of(plan.job))
    return f"{job} {layout}".strip() or "case"


def _require_forecast(plan: Plan) -> Plan:
    """The plan; raises InputError where it forecasts no step time of the device that would run."""
    issues = list(_issues(plan))
    if issues:
        raise InputError(issues)
    return plan


def _issues(plan: Plan) -> Iterable[Issue]:
    estimate = plan_as_launched(plan).estimate
    if estimate is None:
        return  # without a model: a launch's own checks say so
    if isinstance(estimate.time, str):
        yield Issue("no-step-time", "cluster", f"the plan has no step time: {estimate.time}",
                    f"use {MEASURE_FIRST}")  # fmt: skip
    device, runs_on = plan.job.cluster.device, plan.job.launched_kind
    if device is not None and runs_on not in (None, LAUNCHED_AS.get(device.kind)):
        yield Issue("verify-device", "launch.device",
                    f"the plan is of {device.name}, and ranks would run on {runs_on}",
                    f"leave --device out, or use {MEASURE_FIRST}")  # fmt: skip
