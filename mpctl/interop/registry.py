"""The launchers that a plan can be written for, one row each.

A new one is a module with a row here: what it cannot say (refusals), its comments and its text.

>>> sorted(TARGETS)[:2]
['accelerate', 'colossalai']
"""

from __future__ import annotations

from mpctl.errors import InputError
from mpctl.interop import (
    accelerate,
    bridge,
    colossalai,
    deepspeed,
    megatron,
    nanotron,
    torch_mesh,
    torchtitan,
)
from mpctl.interop.emitted import EmittedPlan
from mpctl.planning.plan import Plan
from mpctl.rules.check import listed

_ROWS = (megatron, bridge, torchtitan, deepspeed, accelerate, nanotron, colossalai, torch_mesh)
TARGETS = {row.TARGET.name: row.TARGET for row in _ROWS}


def emit_plan(plan: Plan, target: str) -> EmittedPlan:
    """A legal plan as what a launcher takes. Raises InputError for a name that is not in TARGETS,
    and with every setting that the launcher cannot say."""
    if target not in TARGETS:
        message = f"{target!r} is no launcher that plans are written for"
        raise InputError.of("emit-target", "--emit", message, f"use {listed([*TARGETS])}")
    row = TARGETS[target]
    if issues := list(row.refusals(plan)):
        raise InputError(issues)
    return EmittedPlan(target, row.software, row.language, tuple(row.notes(plan)), row.body(plan))
