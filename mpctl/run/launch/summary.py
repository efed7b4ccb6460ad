"""The summary of a launch: RUN/summary.json (records/rundir/summary.py), plan and run compared.

A rank counts its parameters, the collectives of a step and the bytes of one steady step. The plan
has the same figures by pipeline stage; parameters, collectives and the bytes of parameters,
gradients and optimizer must be equal, activations and the peak are shown next to each other.
"""

from __future__ import annotations

import json
from typing import cast

from mpctl.core.topology import Topology
from mpctl.plan.estimate.communication import MessageCount
from mpctl.plan.estimate.job import Estimate
from mpctl.plan.estimate.memory import StageMemory
from mpctl.plan.planning.plan import Plan, make_plan
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.launches import read_times_away
from mpctl.records.rundir.rank_files import RankReport, Traffic
from mpctl.records.rundir.slow import read_slow
from mpctl.records.rundir.summary import (
    SCHEMA,
    STATES,
    FinishedSummary,
    PlannedMeasured,
    RankSummary,
    RunSummary,
    TrafficComparison,
    save_summary,
    training_progress,
)
from mpctl.run.launch.launch_plan import LaunchPlan
from mpctl.run.launch.supervise import RunOutcome
from mpctl.spec.runtime import launched_runtime


def summarise(plan: Plan, launch: LaunchPlan, outcome: RunOutcome, *, command: str) -> RunSummary:
    """The summary of a run that has ended; command: the command line that launched it."""
    failure, is_training = outcome.failure, launch.request is None and not launch.runs_program
    records = list(launch.run.records())
    saves = [times for report in launch.run.rank_reports()[:1] for times in report.get("saves", [])]
    return {
        "schema": SCHEMA,
        "status": outcome.status,
        **training_progress(records, read_times_away(launch.run.launcher_log, records)),
        "predicted_step_seconds": launch.job.launch.predicted_step_seconds,
        "figures_from": plan.figures_from,
        "saves": save_summary(saves),
        "world_size": launch.world_size,
        "sizes": launch.job.sizes,
        "checkpoint": launch.run.last_checkpoint(),
        "warnings": list(launch.warnings),
        "attempts": outcome.attempts,
        "signal": outcome.signal,
        "failure": None if failure is None else failure.as_dict(),
        "slow": [part.as_dict() for part in read_slow(launch.run.slow)],
        "plan_beside_run": _compare_ranks(plan, launch) if is_training else [],
        "command": command,
        "program": launch.job.launch.program_argv if launch.runs_program else None,
    }


def finished_summary(run: RunDir, step: int) -> RunSummary | FinishedSummary:
    """The summary of a run that has nothing left to train, as the run wrote it; a short one when it
    cannot be read."""
    try:
        summary = json.loads(run.summary.read_text("utf-8"))
    except (OSError, ValueError):
        summary = None
    if isinstance(summary, dict) and summary.get("schema") == SCHEMA:
        return cast(RunSummary, summary)
    return {"schema": SCHEMA, "status": "finished", "steps": step, "checkpoint": step}


def _compare_ranks(plan: Plan, launch: LaunchPlan) -> list[RankSummary]:
    """Plan and run of every rank that finished; empty for a job that cannot be estimated."""
    plan = plan_as_launched(plan)
    topology, estimate = plan.topology, plan.estimate
    if topology is None or estimate is None:
        return []
    return [_compare_rank(report, topology, estimate) for report in launch.run.rank_reports()]


def _compare_rank(report: RankReport, topology: Topology, estimate: Estimate) -> RankSummary:
    stage = topology.coords(report["rank"])["pp"]
    traffic: TrafficComparison = {
        "planned": planned_traffic(estimate.messages[stage]),
        "measured": report["step_traffic"],
    }
    parameters: PlannedMeasured = {"planned": estimate.memory[stage].parameters, "measured": report["parameters"]}
    validation = _compare_validation(report, topology, estimate)
    memory = compare_memory(estimate.expected_memory[stage], report.get("step_memory") or {})
    exact = [traffic, parameters, *(memory[kind] for kind in STATES if kind in memory)]
    exact += [] if validation is None else [validation]
    return {
        "rank": report["rank"],
        "agrees": all(pair["planned"] == pair["measured"] for pair in exact),
        "parameters": parameters,
        "step_traffic": traffic,
        "validation_traffic": validation,
        "peak_memory_bytes": report["peak_memory_bytes"],
        "memory": memory,
        "reserved_memory_bytes": report.get("reserved_memory_bytes"),
        "device": report.get("device"),
    }


def _compare_validation(report: RankReport, topology: Topology, estimate: Estimate) -> TrafficComparison | None:
    """Collectives of the last validation; None when there was none."""
    measured = report.get("validation")
    if measured is None:
        return None
    coords = topology.coords(report["rank"])
    planned = estimate.validation(coords["pp"], coords["dp"], measured["samples"])
    return {"planned": planned_traffic(planned), "measured": measured["traffic"]}


def plan_as_launched(plan: Plan) -> Plan:
    """The plan of what mpctl's own workers run, whatever training software the job was planned
    for (training.runtime)."""
    job = plan.job
    runtime = launched_runtime(job.training.runtime)
    if runtime == job.training.runtime:
        return plan
    training = job.training.model_copy(update={"runtime": runtime})
    return make_plan(job.model_copy(update={"training": training}))


def compare_memory(planned: StageMemory, measured: dict[str, int | None]) -> dict[str, PlannedMeasured]:
    """Bytes of one steady step by kind; kinds that were not measured are left out."""
    attributes = {**STATES, "activations": "activation_bytes", "peak": "allocated_bytes", "reserved": "reserved_bytes"}
    return {
        kind: {"planned": getattr(planned, attribute), "measured": size}
        for kind, attribute in attributes.items()
        if (size := measured.get(kind)) is not None
    }


def planned_traffic(messages: tuple[MessageCount, ...]) -> Traffic:
    """A stage's messages in the form in which a rank counts them."""
    traffic: Traffic = {}
    for message in messages:
        entry = traffic.setdefault(f"{message.axis} {message.kind}", {"count": 0, "bytes": 0})
        entry["count"] += message.count
        entry["bytes"] += message.count * message.bytes
    return dict(sorted(traffic.items()))
