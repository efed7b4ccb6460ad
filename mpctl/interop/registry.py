"""The launchers that a plan can be written for, one row each.

A new one is a module with a row here: what it cannot say (refusals), its comments and its text.

>>> sorted(TARGETS)[:2]
['accelerate', 'colossalai']
"""

from __future__ import annotations

from collections.abc import Iterator

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
from mpctl.planning.runtimes import runtime_of
from mpctl.planning.summary import step_text
from mpctl.rules.check import listed
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import get_profile

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
    notes = (*_runtime_note(plan, target), *row.notes(plan))
    return EmittedPlan(target, row.software, row.language, notes, row.body(plan))


def launcher_runtime(job: JobSpec, target: str) -> str | None:
    """The runtime that a job is planned under before it is written for a launcher; None where there
    is none whose figures are the launcher's on the job's devices, by default NVIDIA's."""
    return runtime_of(target, job.device_kind or "cuda")


def _runtime_note(plan: Plan, target: str) -> Iterator[str]:
    """Whose speed and memory the plan assumes, and the step's time where it is the launcher's."""
    runtime, estimate = plan.job.training.runtime, plan.estimate
    if estimate is None:
        return
    if target not in get_profile(runtime).runs.emit:
        software, theirs = TARGETS[target].software, launcher_runtime(plan.job, target)
        way_out = f": --runtime {theirs}" if theirs else ", of which there are no figures here"
        yield f"memory and time are estimated for runtime {runtime}, not for {software}{way_out}"
    elif not isinstance(estimate.time, str):
        yield f"planned for runtime {runtime}; a step takes {step_text(estimate.time)}"
