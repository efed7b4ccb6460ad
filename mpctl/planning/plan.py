"""A plan: one job with everything that follows from it, as one frozen value.

`make_plan` never prints and never fails on a bad layout: the checks say what is wrong, and what
cannot be known without a legal layout is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpctl.errors import InputError
from mpctl.layout.job_layout import JobLayout, Stages, find_topology
from mpctl.planning.layout_settings import NearbyLayout
from mpctl.rules.check import Check
from mpctl.rules.model import memory_check
from mpctl.rules.validate import RULES, Rule, check_job, with_tried_hints
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_partial
from mpctl.topology import Topology

if TYPE_CHECKING:
    from mpctl.estimate.job import Estimate


@dataclass(frozen=True)
class Plan:
    job: JobSpec
    checks: tuple[Check, ...]
    topology: Topology | None
    stages: Stages | None
    estimate: Estimate | None
    nearest: tuple[NearbyLayout, ...] = ()

    @property
    def errors(self) -> list[Check]:
        return [check for check in self.checks if check.status == "error"]

    @property
    def warnings(self) -> list[Check]:
        return [check for check in self.checks if check.status == "warning"]

    @property
    def fits(self) -> bool | None:
        """Whether the fullest rank's memory is on its device; None without a model or a device."""
        found = [check.status == "ok" for check in self.checks if check.rule == "memory-fits"]
        return found[0] if found else None

    def require_legal(self) -> Topology:
        """The topology of a legal plan; raises InputError with every error otherwise."""
        if self.errors or self.topology is None:
            raise InputError([check.issue for check in self.errors])
        return self.topology


def load_plan(
    source: str | None,
    overrides: Mapping[str, Any] | None = None,
    rules: Sequence[Rule] = RULES,
) -> Plan:
    """The legal plan of a job by path or preset name; raises InputError with every issue at once,
    those of the schema and those of the rules that can still be asked."""
    loaded = load_partial(source, overrides)
    job = loaded.job
    checks = check_job(job, loaded.tables_with_errors, rules) if job else []
    errors = [check for check in checks if check.status == "error"]
    if loaded.issues or errors or job is None:
        told = with_tried_hints(job, errors, loaded.open_settings, rules) if job else []
        raise InputError([*loaded.issues, *(check.issue for check in told)])
    renamed = [Check(i.rule, "warning", i.where, i.message, i.hint) for i in loaded.warnings]
    return make_plan(job, [*renamed, *checks])


def make_plan(job: JobSpec, checked: Sequence[Check] | None = None) -> Plan:
    """The plan of a complete job: its checks and, where they allow it, topology and estimates.

    checked: what `check_job` answered, where it was asked before.
    """
    checks = check_job(job) if checked is None else list(checked)
    legal = all(check.status != "error" for check in checks)
    topology = find_topology(job)
    layout = JobLayout.of(job) if job.model and legal else None
    estimate: Estimate | None = None
    if layout and topology:  # a plan without a model never pays for the import
        from mpctl.estimate.job import Estimate

        estimate = Estimate(layout)
    if estimate:
        fullest = max(estimate.memory, key=lambda stage: stage.device_bytes)
        fits = memory_check(job, fullest.device_bytes, fullest.stage)
        checks += [fits] if fits else []
    stages = layout.stages if layout else None
    return Plan(job, tuple(checks), topology, stages, estimate)
