"""One layer in every tensor mode that some ranks allow, measured and compared with its plan.

The ranks are those of a launch, on this host or others (measure/bench/probe.py). They build the layer once
for each mode and run it in rounds, A B C A B C, so that disturbances on the machine affect all
alike (train/runtime/probes/layers.py). Bytes sent are counted collective by collective, and stated per
rank over rings as in plans (planning/layer_figures.py). Against the law: a rank's parameters and
activations times the ranks, over those of the unsharded layer; 1 is a P-th. Four ranks are timed in
1d and 2d: 2.5d of depth 1 would be 2d again, and 4 is no cube.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.collectives import sent_by_rank
from mpctl.core.errors import InputError, Issue, IssueEntry
from mpctl.measure.bench.probe import RankBench
from mpctl.measure.bench.report import BenchEnvelope, BenchRow, envelope, spread
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.planning.plan import Overrides, Plan
from mpctl.plan.planning.tensor_modes import mode_choices, same_as_2d
from mpctl.plan.planning.traffic import LayerFigures, layer_figures
from mpctl.plan.rules.check import way_out
from mpctl.plan.rules.validate import with_tried_hints
from mpctl.records.rundir.rank_files import Traffic
from mpctl.records.rundir.requests import LayerAnswer, LayerRequest, LayerSizes, LayerTiming
from mpctl.run.clusters.connect import bench_issues
from mpctl.run.hosts.machine import Machine
from mpctl.run.inference.task import TaskOptions, task_plan
from mpctl.run.launch.preflight import chosen_device
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job

DEFAULT_JOB = {"model": "demo-gpt", "cluster": "this-machine", "training.micro_batch_size": 8}
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
    """The modes of the ranks that can be timed, and why the others cannot."""

    ranks: int
    cases: tuple[ModeCase, ...]
    refused: tuple[tuple[str, Issue], ...]

    @property
    def plan(self) -> Plan:
        return self.cases[0].plan

    @property
    def job(self) -> JobSpec:
        """The job whose model is timed, in the first of the modes."""
        return self.plan.job


def layer_job(source: str | None, settings: Overrides) -> JobSpec:
    """The job whose model is timed. Raises InputError where it cannot be read, and where settings
    choose its layout, which the bench does itself."""
    if laid := [name for name in settings if name.startswith("parallel.")]:
        raise InputError.of(
            "layout-is-benched",
            laid[0],
            "the bench lays out its ranks itself",
            "leave it out, and say how many ranks: --ranks 8",
        )
    return load_job(source, settings)


def mode_cases(job: JobSpec, ranks: int, machine: Machine, *, device: str) -> ModeCases:
    """The modes in which `ranks` ranks can run a layer of the job's model, without dropout and
    recomputation: on this machine, or shared evenly by the nodes of the job. Raises InputError
    where there is none, or no model."""
    if job.model is None:
        raise InputError.of(
            "no-model", "model", "a bench of a layer needs a model", "leave JOB out, or name a model: --model demo-gpt"
        )
    cases: list[ModeCase] = []
    refused: list[tuple[str, Issue]] = []
    options = TaskOptions(sizes={"tp": ranks}, device=device, nodes=job.cluster.nodes)
    for mode, depth in mode_choices(ranks):
        plan = task_plan(job, replace(options, tensor_mode=mode, tensor_depth=depth))
        issues = _refusals(plan)
        if not issues and (issue := same_as_2d(ranks, mode, depth, "--ranks")):
            issues = [issue]
        if not issues:
            issues = bench_issues(plan, machine, only_measures=True)
        if issues:
            refused += [(mode, issue) for issue in issues]
        else:
            cases.append(_case(plan, mode, depth))
    if not cases:
        raise InputError(dict.fromkeys(issue for _, issue in refused))
    return ModeCases(ranks, tuple(cases), tuple(refused))


def _refusals(plan: Plan) -> list[Issue]:
    """Return the reasons why the ranks cannot run a mode. Fixes are options of the bench: numbers of
    ranks, and no other mode, since each is tried anyway."""
    checks = []
    own = [check for check in plan.errors if check.rule == "tensor-mode-family"]
    for check in own or plan.errors:  # only this reason matters for a family that never runs the mode
        offers = [offer for offer in check.offers if offer.setting != "parallel.tensor_mode"]
        offers = [offer._replace(noun="--ranks") if offer.setting == "parallel.tp" else offer for offer in offers]
        hint = way_out(offers, check.more) if offers else check.more and f"use {check.more}"
        checks.append(check._replace(offers=tuple(offers), hint=hint))
    hinted = with_tried_hints(plan.job, checks, LEFT_OPEN)
    return [check.issue for check in hinted]


def _case(plan: Plan, mode: str, depth: int | None) -> ModeCase:
    layout = JobLayout.of(plan.job)
    figures = layer_figures(layout)
    return ModeCase(mode, depth, layout.grid.axes, plan, figures, layout.group_sizes)


class ModeRow(BenchRow):
    """A tensor mode; its seconds are those of a pass on the slowest rank. cpu_seconds: processor
    time of a rank, the median. sent_bytes: of a rank over rings; traffic: bytes of full messages by
    group and kind. planned_..: the plan's figures for the same. parameters_law, activations_law: a
    rank's, times the ranks, over the unsharded layer's."""

    mode: str
    depth: int | None
    axes: dict[str, int]
    cpu_seconds: float
    sent_bytes: float
    planned_sent_bytes: float
    traffic: dict[str, int]
    planned_traffic: dict[str, int]
    collectives: int
    planned_collectives: int
    parameter_bytes: int
    planned_parameter_bytes: int
    saved_bytes: int
    planned_saved_bytes: int
    parameters_law: float
    activations_law: float


class WholeLayer(TypedDict):
    """Bytes of the unsharded layer: of its parameters, and of the activations that its forward
    saves."""

    parameter_bytes: int
    saved_bytes: int


class RefusedMode(TypedDict):
    """A mode that cannot be timed, and why."""

    mode: str
    issue: IssueEntry


class ModeFindings(TypedDict):
    """The timed layer. is_rehearsal: more ranks than cores (or GPUs), so that wall time means
    nothing; layer: its sizes; micro_batch_size: samples of a pass; whole: the unsharded layer."""

    ranks: int
    is_rehearsal: bool
    layer: dict[str, int]
    micro_batch_size: int
    dtype: str
    steps: int
    whole: WholeLayer | None
    refused: list[RefusedMode]


class TensorModesReport(BenchEnvelope):
    """Output of `mpctl bench tensor-modes --json`."""

    results: list[ModeRow]
    findings: ModeFindings


@dataclass
class ModeBench(RankBench):
    """One layer in every mode. steps: passes of a timing; seconds: limit of all rounds, None for no
    limit; machine: the smallest of the ranks' hosts; sizes: of the layer by case, None for the
    unsharded one."""

    cases: ModeCases
    steps: int
    machine: Machine
    seconds: float | None = None
    sizes: dict[int | None, LayerSizes] = field(default_factory=dict)

    timing = "time the layer"

    @property
    def round_timings(self) -> int:
        return len(self.cases.cases)

    def request(self) -> LayerRequest:
        return {
            "task": "layers",
            "rounds": self.rounds,
            "steps": self.steps,
            "seconds": self.seconds,
            "cases": [{"mode": case.mode, "depth": case.depth} for case in self.cases.cases],
        }

    def take(self, answer: LayerAnswer) -> None:
        if answer["event"] == "sizes":
            self.sizes[answer["case"]] = answer
        else:
            self.timings.append(answer)

    def use(self, machine: Machine) -> None:
        self.machine = machine

    @property
    def rows(self) -> list[ModeRow]:
        timings: dict[int, list[LayerTiming]] = {}
        for timing in self.timings:
            timings.setdefault(timing["case"], []).append(timing)
        return [
            _row(self.cases.ranks, case, self.sizes[n], timings[n], self.sizes[None])
            for n, case in enumerate(self.cases.cases)
            if n in timings
        ]

    def report(self) -> TensorModesReport:
        cases, job, unsharded = self.cases, self.cases.job, self.sizes.get(None)
        model = job.model
        assert model is not None, "a bench is of a model"
        sizes = {"hidden": model.hidden, "heads": model.heads, "ffn": model.ffn}
        is_cuda = chosen_device(job, self.machine) == "cuda"
        cores = self.machine.gpus if is_cuda else self.machine.cores
        return {
            **envelope(
                "tensor-modes",
                job.name or model.name,
                self.environment,
                self.command,
                is_complete=self.is_complete,
                hosts=self.hosts,
            ),
            "results": self.rows,
            "findings": {
                "ranks": cases.ranks,
                "is_rehearsal": cases.ranks > cores * job.cluster.nodes,
                "layer": {**sizes, "sequence": model.seq_length},
                "micro_batch_size": job.training.micro_batch_size,
                "dtype": job.training.dtype,
                "steps": self.steps,
                "whole": None
                if unsharded is None
                else {"parameter_bytes": unsharded["parameter_bytes"], "saved_bytes": unsharded["saved_bytes"]},
                "refused": [{"mode": mode, "issue": issue.as_dict()} for mode, issue in cases.refused],
            },
        }


def _row(ranks: int, case: ModeCase, own: LayerSizes, timings: Sequence[LayerTiming], unsharded: LayerSizes) -> ModeRow:
    planned = case.planned
    return {
        "name": f"{case.mode}, depth {case.depth}" if case.depth else case.mode,
        **spread([timing["seconds"] for timing in timings]),
        "mode": case.mode,
        "depth": case.depth,
        "axes": dict(case.axes),
        "cpu_seconds": median(timing["cpu_seconds"] for timing in timings),
        "sent_bytes": _sent(own["traffic"], case.group_sizes),
        "planned_sent_bytes": planned.sent_bytes,
        "traffic": {name: entry["bytes"] for name, entry in own["traffic"].items()},
        "planned_traffic": dict(planned.traffic),
        "collectives": sum(entry["count"] for entry in own["traffic"].values()),
        "planned_collectives": planned.collectives,
        "parameter_bytes": own["parameter_bytes"],
        "planned_parameter_bytes": planned.parameter_bytes,
        "saved_bytes": own["saved_bytes"],
        "planned_saved_bytes": planned.saved_bytes,
        "parameters_law": ranks * own["parameter_bytes"] / unsharded["parameter_bytes"],
        "activations_law": ranks * own["saved_bytes"] / unsharded["saved_bytes"],
    }


def _sent(traffic: Traffic, group_sizes: Mapping[str, int]) -> float:
    """Bytes that a rank sends where every collective is a ring, averaged over the ranks."""
    named = ((name.split(), entry["bytes"]) for name, entry in traffic.items())
    return sum(sent_by_rank(kind, size, group_sizes[axis]) for (axis, kind), size in named)
