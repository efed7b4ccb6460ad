"""A plan: one job with everything that follows from it, as one frozen value.

`make_plan` never prints and never fails on a bad layout: the checks report errors, and figures that
need a legal layout are None. It does not search: the caller that shows the plan adds nearby layouts
that fit (plan/search/nearest.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mpctl.core.errors import InputError
from mpctl.core.topology import Topology
from mpctl.core.units import plural
from mpctl.model.layout.draft import LayoutDraft
from mpctl.plan.planning.layout_settings import NearbyLayout
from mpctl.plan.rules.check import Check
from mpctl.plan.rules.model import host_memory_check, memory_check
from mpctl.plan.rules.validate import RULES, Rule, check_job, with_tried_hints
from mpctl.spec.figure_sources import FigureSource, figure_sources
from mpctl.spec.job import JobSpec
from mpctl.spec.load import Source, load_partial

if TYPE_CHECKING:
    from mpctl.model.layout.job_layout import JobLayout, Stages
    from mpctl.plan.estimate.job import Estimate
    from mpctl.spec.presets import PresetFile

# Settings that override those of a job, from a command line or a program, by full or short name:
# {"parallel.tp": 2, "model": "gpt2"}. They are checked when the job is read.
Overrides = Mapping[str, object]


@dataclass(frozen=True, repr=False)
class Plan:
    """A complete job and its checks and estimates.

    checks: every rule's answer. topology: the place of every rank; None where the axes do not fill
    the world. estimate: messages, memory and time of a legal job with a model, else None. nearest:
    where the job does not fit its devices, layouts that do. presets: the user's presets that the job starts
    from.
    """

    job: JobSpec
    checks: tuple[Check, ...]
    topology: Topology | None
    estimate: Estimate | None
    nearest: tuple[NearbyLayout, ...] = ()
    presets: tuple[PresetFile, ...] = ()

    def __repr__(self) -> str:
        found = plural(len(self.errors), "error") if self.errors else repr(self.estimate)
        return f"Plan({self.job.label}, {found})"

    @property
    def layout(self) -> JobLayout | None:
        """The layout of a legal job with a model."""
        return self.estimate.layout if self.estimate else None

    @property
    def stages(self) -> Stages | None:
        """The spans of layers by [stage][chunk] of a legal job with a model."""
        return self.layout.stages if self.layout else None

    @property
    def errors(self) -> list[Check]:
        """The checks that forbid this layout."""
        return [check for check in self.checks if check.status == "error"]

    @property
    def warnings(self) -> list[Check]:
        """The checks that did not pass and forbid nothing."""
        return [check for check in self.checks if check.status == "warning"]

    @property
    def fits(self) -> bool | None:
        """Whether the fullest rank fits the memory of its device; None without a model or a
        device."""
        return self.estimate.fits if self.estimate else None

    @property
    def figures_from(self) -> list[FigureSource]:
        """The user's presets behind the figures."""
        return figure_sources(self.job, self.presets)

    def evaluate(self) -> Plan:
        """The same plan, with every figure of its estimate computed: errors are raised here, not
        while something is printed."""
        if (estimate := self.estimate) is not None:
            for figure in ("memory", "time", "blocks", "messages", "checkpoint_bytes"):
                getattr(estimate, figure)
        return self

    def require_legal(self) -> Topology:
        """The topology of a legal plan; raises InputError with every error otherwise."""
        if self.errors or self.topology is None:
            raise InputError([check.issue for check in self.errors])
        return self.topology


def load_plan(source: Source, overrides: Overrides | None = None, rules: Sequence[Rule] | None = None) -> Plan:
    """The legal plan of a job.

    source: a job file, a job preset's name, or tables as a line of a batch has them,
    `{"model": {"preset": "gpt2"}, "parallel": {"tp": 2}}`. overrides: settings by full or short name. rules: the
    rules to check, instead of all. Raises InputError with every issue at once: those of the schema, and those of
    the rules that can still be checked.
    """
    rules = RULES if rules is None else rules
    loaded = load_partial(source, overrides)
    job = loaded.job
    draft = LayoutDraft(job) if job else None
    checks = check_job(job, loaded.tables_with_errors, rules, draft) if job else []
    errors = [check for check in checks if check.status == "error"]
    if loaded.issues or errors or job is None:
        hinted = with_tried_hints(job, errors, loaded.open_settings, rules) if job else []
        raise InputError([*loaded.issues, *(check.issue for check in hinted)])
    renamed = [Check(i.rule, "warning", i.where, i.message, i.hint) for i in loaded.warnings]
    return replace(make_plan(job, [*renamed, *checks], draft), presets=loaded.presets)


def make_plan(job: JobSpec, checked: Sequence[Check] | None = None, draft: LayoutDraft | None = None) -> Plan:
    """The plan of a complete job: its checks and, where they allow it, topology and estimates.

    checked: the answers of `check_job`, where it was called before; draft: the draft it was called
    with.
    """
    draft = draft or LayoutDraft(job)
    checks = tuple(check_job(job, draft=draft) if checked is None else checked)
    topology = draft.topology
    if job.model is None or topology is None or any(check.status == "error" for check in checks):
        return Plan(job, checks, topology, estimate=None)
    from mpctl.plan.estimate.job import Estimate  # a plan without a model never pays for these

    estimate = Estimate(draft.layout())
    fullest = estimate.fullest_stage
    fits = memory_check(job, fullest.device_bytes, fullest.stage)
    on_host = None
    if job.cluster.host_memory is not None:
        on_host = host_memory_check(job, estimate.host_memory.node_bytes)
    more = [check for check in (fits, on_host) if check is not None]
    return Plan(job, (*checks, *more), topology, estimate)
