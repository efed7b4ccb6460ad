"""The tensor modes of some ranks that a layer of a model can be timed in, and why not the others.

By hand, 4 ranks: 1d and 2d; 2.5d of depth 1 would be 2d again, and 4 is no cube.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mpctl.clusters.connect import measuring_refusals
from mpctl.errors import InputError, Issue
from mpctl.inference.task import TaskOptions, task_plan
from mpctl.launch.node.machine import Machine
from mpctl.layout.job_layout import JobLayout
from mpctl.planning.plan import Overrides, Plan
from mpctl.planning.tensor_modes import mode_choices, same_as_2d
from mpctl.planning.traffic import LayerFigures, layer_figures
from mpctl.rules.check import way_out
from mpctl.rules.validate import with_tried_hints
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job

DEFAULT_JOB = {
    "model": "demo-gpt", "cluster": "this-machine", "training.micro_batch_size": 8,
}  # fmt: skip
LEFT_OPEN = frozenset({"cluster.gpus_per_node", "parallel.dp", "training.global_batch_size"})


@dataclass(frozen=True)
class ModeCase:
    """A tensor mode to be timed. plan: its layout of all ranks; planned: of one layer."""

    mode: str
    depth: int | None
    axes: Mapping[str, int]
    plan: Plan
    planned: LayerFigures
    group_sizes: Mapping[str, int]


@dataclass(frozen=True)
class ModeCases:
    """The modes of so many ranks that can be timed, and why the others cannot."""

    ranks: int
    cases: tuple[ModeCase, ...]
    refused: tuple[tuple[str, Issue], ...]

    @property
    def plan(self) -> Plan:
        """The plan of the first of the modes; its ranks time all of them."""
        return self.cases[0].plan

    @property
    def job(self) -> JobSpec:
        """The job whose model is timed, in the first of the modes."""
        return self.plan.job


def layer_job(source: str | None, settings: Overrides) -> JobSpec:
    """The job whose model is timed. Raises InputError where it cannot be read, and where settings
    lay out its ranks, which the bench does itself."""
    if laid := [name for name in settings if name.startswith("parallel.")]:
        raise InputError.of("layout-is-benched", laid[0], "the bench lays out its ranks itself",
                            "leave it out, and say how many ranks: --ranks 8")  # fmt: skip
    return load_job(source, settings)


def mode_cases(job: JobSpec, ranks: int, machine: Machine, *, device: str) -> ModeCases:
    """The modes in which `ranks` ranks can run a layer of the job's model, without dropout and
    recomputation: on this machine, or shared evenly by the nodes of the job. Raises InputError
    where there is none, or no model."""
    if job.model is None:
        raise InputError.of("no-model", "model", "a bench of a layer needs a model",
                            "leave JOB out, or name a model: --model demo-gpt")  # fmt: skip
    cases: list[ModeCase] = []
    refused: list[tuple[str, Issue]] = []
    options = TaskOptions(sizes={"tp": ranks}, device=device, nodes=job.cluster.nodes)
    for mode, depth in mode_choices(ranks):
        plan = task_plan(job, replace(options, tensor_mode=mode, tensor_depth=depth))
        issues = _refusals(plan)
        if not issues and (issue := same_as_2d(ranks, mode, depth, "--ranks")):
            issues = [issue]
        if not issues:
            issues = measuring_refusals(plan, machine)
        if issues:
            refused += [(mode, issue) for issue in issues]
        else:
            cases.append(_case(plan, mode, depth))
    if not cases:
        raise InputError(dict.fromkeys(issue for _, issue in refused))
    return ModeCases(ranks, tuple(cases), tuple(refused))


def _refusals(plan: Plan) -> list[Issue]:
    """Why the ranks cannot run a mode, with ways out by options of the bench: numbers of ranks, and
    no other mode, since each is tried anyway."""
    checks = []
    own = [check for check in plan.errors if check.rule == "tensor-mode-family"]
    for check in own or plan.errors:  # no other way out helps a family that never runs the mode
        offers = [offer for offer in check.offers if offer.setting != "parallel.tensor_mode"]
        offers = [
            replace(offer, noun="--ranks") if offer.setting == "parallel.tp" else offer
            for offer in offers
        ]
        hint = way_out(offers, check.more) if offers else check.more and f"use {check.more}"
        checks.append(replace(check, offers=tuple(offers), hint=hint))
    hinted = with_tried_hints(plan.job, checks, LEFT_OPEN)
    return [check.issue for check in hinted]


def _case(plan: Plan, mode: str, depth: int | None) -> ModeCase:
    layout = JobLayout.of(plan.job)
    figures = layer_figures(layout)
    return ModeCase(mode, depth, layout.grid.axes, plan, figures, layout.group_sizes)
