"""The built-in layouts of one job: those that its model, its nodes and this machine can have.

What a model cannot split is left out and said, so that one set serves all models; where no layout
is left, all are kept, so that the reasons are reported as of any job.

By hand, two key-value heads: tp 4 is left out. One GPU: every layout of two ranks and more is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mpctl.bench.verify_cases import PlanWith, Wanted
from mpctl.bench.verify_layouts import (
    DEFAULT_LAYOUTS,
    QUICK_LAYOUTS,
    LayoutFields,
    fields_name,
    layout_overrides,
    ranks_of,
)
from mpctl.errors import InputError, Issue
from mpctl.launch.node.machine import Machine
from mpctl.planning.plan import Overrides, Plan
from mpctl.rules.launched import why_not_launched
from mpctl.spec.names import full_name
from mpctl.units import plural


def built_in_set(
    plan_with: PlanWith, given: Overrides, machine: Machine, *, quick: bool
) -> tuple[list[Wanted], dict[str, str]]:
    """The built-in layouts of one job, of which quick takes a few; and by name those that it cannot
    have, with the reason.

    plan_with: plans the job with settings over its own; given: settings that were typed, of which
    the number of nodes holds for every layout. Raises InputError for those that each layout has its
    own value of.
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
            able.append(Wanted("", _handing(plan)))
    if able:
        return able, left_out
    every = (partial(plan_with, layout_overrides(layout, nodes)) for layout in layouts)
    return [Wanted("", make_plan) for make_plan in every], {}


def _nodes(given: Overrides) -> int:
    """The number of nodes that was typed, 1 without one that can be. Raises InputError for settings
    of the layout itself."""
    typed = {full_name(name): value for name, value in given.items()}
    nodes = typed.pop("cluster.nodes", 1)
    own = layout_overrides({})
    issues = [
        Issue("layout-setting", name, "each layout of the built-in set has its own",
              "leave it out, or name the JOB that is to run so: mpctl bench verify demo ...")
        for name in typed if name in own or name == "parallel"
    ]  # fmt: skip
    if issues:
        raise InputError(issues)
    return nodes if isinstance(nodes, int) and nodes > 0 else 1


def _plan_or_reason(
    plan_with: PlanWith, layout: LayoutFields, nodes: int, machine: Machine
) -> Plan | str:
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


def _handing(plan: Plan) -> Callable[[], Plan]:
    return lambda: plan
