"""The cases of `mpctl bench verify`: plans with predictions that runs here can be compared with.

A plan is refused if it predicts no step time, or is for another kind of device than ranks would run
on: CPU cores cannot verify a plan of GPUs. Layouts of the built-in set that a model cannot have are
left out and reported, so that one set serves all models (two key-value heads: no tp 4); where no
layout is left, all are kept, so that the reasons are reported as for any job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from mpctl.core.errors import InputError, Issue
from mpctl.core.units import plural
from mpctl.measure.bench.cases import RunCase
from mpctl.measure.bench.layouts import (
    DEFAULT_LAYOUTS,
    QUICK_LAYOUTS,
    LayoutFields,
    fields_name,
    file_name,
    layout_name,
    layout_overrides,
    numbered_titles,
    ranks_of,
)
from mpctl.plan.planning.layout_settings import layout_of
from mpctl.plan.planning.plan import Overrides, Plan
from mpctl.plan.rules.launched import why_not_launched
from mpctl.run.hosts.machine import Machine
from mpctl.run.launch.summary import plan_as_launched
from mpctl.spec.launch import LAUNCHED_AS
from mpctl.spec.names import full_name

PlanWith = Callable[[Overrides], Plan]
MEASURE_FIRST = "--cluster FILE with a preset of this machine, as `mpctl bench machine` writes it"


class Wanted(NamedTuple):
    """A layout to be verified. job: its job's name in titles, empty where all are of one job; plan:
    its plan, or why there is none."""

    job: str
    plan: Plan | InputError


def wanted_plan(make_plan: Callable[[], Plan], job: str = "") -> Wanted:
    """A legal plan that predicts the step time of the device that would run, or its issues."""
    try:
        plan = make_plan()
        if issues := list(_issues(plan)):
            raise InputError(issues)
    except InputError as error:
        return Wanted(job, error)
    return Wanted(job, plan)


def verify_cases(wanted: Sequence[Wanted]) -> list[RunCase]:
    """A case for each, named by job and layout. The make_plan of a case raises its issues, so that
    `plan_cases` reports those of all."""
    titles = numbered_titles(_title(*each) for each in wanted)
    return [
        RunCase(file_name(title), partial(_legal, each.plan), title) for title, each in zip(titles, wanted, strict=True)
    ]


def _legal(plan: Plan | InputError) -> Plan:
    if isinstance(plan, InputError):
        raise plan
    return plan


def _title(job: str, plan: Plan | InputError) -> str:
    layout = "" if isinstance(plan, InputError) else layout_name(layout_of(plan.job))
    return f"{job} {layout}".strip() or "case"


def _issues(plan: Plan) -> Iterable[Issue]:
    estimate = plan_as_launched(plan).estimate
    if estimate is None:
        return  # without a model: the checks of a launch report this
    if isinstance(estimate.time, str):
        yield Issue("no-step-time", "cluster", f"the plan has no step time: {estimate.time}", f"use {MEASURE_FIRST}")
    device, runs_on = plan.job.cluster.device, plan.job.launched_kind
    if device is not None and runs_on not in (None, LAUNCHED_AS.get(device.kind)):
        yield Issue(
            "verify-device",
            "launch.device",
            f"the plan is of {device.name}, and ranks would run on {runs_on}",
            f"leave --device out, or use {MEASURE_FIRST}",
        )


def built_in_set(
    plan_with: PlanWith, given: Overrides, machine: Machine, *, quick: bool
) -> tuple[list[Wanted], dict[str, str]]:
    """The built-in layouts of one job, only a few with quick; and by name those that it cannot
    have, with the reason.

    plan_with: plans the job with other settings; given: settings on the command line, of which the
    number of nodes applies to every layout. Raises InputError for settings that each layout
    determines.
    """
    nodes = _nodes(given)
    able: list[Wanted] = []
    left_out: dict[str, str] = {}
    layouts = QUICK_LAYOUTS if quick else DEFAULT_LAYOUTS
    for layout in layouts:
        plan = _plan_or_reason(plan_with, layout, nodes, machine)
        if isinstance(plan, str):
            left_out[fields_name(layout)] = plan
        else:
            able.append(wanted_plan(partial(_legal, plan)))
    if able:
        return able, left_out
    every = (partial(plan_with, layout_overrides(layout, nodes)) for layout in layouts)
    return list(map(wanted_plan, every)), {}


def _nodes(given: Overrides) -> int:
    """The number of nodes on the command line, 1 without a valid one. Raises InputError for
    settings of the layout itself."""
    typed = {full_name(name): value for name, value in given.items()}
    nodes = typed.pop("cluster.nodes", 1)
    own = layout_overrides({})
    issues = [
        Issue(
            "layout-setting",
            name,
            "each layout of the built-in set has its own",
            "leave it out, or name the JOB that is to run so: mpctl bench verify demo ...",
        )
        for name in typed
        if name in own or name == "parallel"
    ]
    if issues:
        raise InputError(issues)
    return nodes if isinstance(nodes, int) and nodes > 0 else 1


def _plan_or_reason(plan_with: PlanWith, layout: LayoutFields, nodes: int, machine: Machine) -> Plan | str:
    """The plan of a layout that can run; else in words why not."""
    ranks = ranks_of(layout)
    if ranks % nodes:
        return f"{plural(ranks, 'rank')} cannot be shared evenly by {nodes} nodes"
    try:
        plan = plan_with(layout_overrides(layout, nodes))
    except InputError as error:
        return error.issues[0].message
    if reasons := why_not_launched(plan.job):
        return reasons[0].message
    if plan.job.launched_kind == "cuda" and nodes == 1 and ranks > machine.gpus:
        return f"this machine shows {plural(machine.gpus, 'GPU')}"
    return plan
