"""The account of a run, RUN/summary.json: how it ended, what was reached, plan beside run."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from mpctl.durable import write_whole
from mpctl.estimate.memory import StageMemory
from mpctl.estimate.messages import Message
from mpctl.launch.launch_plan import LaunchPlan
from mpctl.launch.supervise import RunOutcome
from mpctl.planning.plan import Plan, make_plan
from mpctl.rundir.directory import RunDir
from mpctl.spec.runtime import OWN_RUNTIME, is_launched
from mpctl.topology import Topology

WARM_UP_STEPS = 2
STATES = {"parameters": "parameter_bytes", "gradients": "gradient_bytes",
          "optimizer": "optimizer_bytes"}  # fmt: skip


def summarise(plan: Plan, launch: LaunchPlan, outcome: RunOutcome) -> dict[str, Any]:
    """Schema mpctl.run/1."""
    return {
        "schema": "mpctl.run/1",
        "status": outcome.status,
        **reached(list(launch.run.records())),
        "predicted_step_seconds": launch.job.launch.predicted_step_seconds,
        "world_size": launch.world_size,
        "sizes": launch.job.sizes,
        "checkpoint": launch.run.last_checkpoint(),
        "warnings": list(launch.warnings),
        "attempts": outcome.attempts,
        "signal": outcome.signal,
        "failure": None if outcome.failure is None else _failure(outcome),
        "plan_beside_run": _comparison(plan, launch),
        "command": shlex.join([sys.executable, "-m", "mpctl", *sys.argv[1:]]),
    }


def reached(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How far the records of a run go: steps, losses, tokens, and the medians of a step's seconds
    and tokens/s after the warm-up."""
    steady = records[WARM_UP_STEPS:] or records
    validated: dict[str, Any] = next((r for r in reversed(records) if "validation_loss" in r), {})
    first, last = (records[0], records[-1]) if records else ({}, {})
    return {
        "steps": last.get("step", 0),
        "final_loss": last.get("loss"),
        "validation_loss": validated.get("validation_loss"),
        "initial_validation_loss": first.get("initial_validation_loss"),
        "validation_losses": validated.get("validation_losses", {}),
        "initial_validation_losses": first.get("initial_validation_losses", {}),
        "tokens": last.get("tokens", 0),
        "step_seconds": median(r["step_seconds"] for r in steady) if steady else None,
        "tokens_per_second": median(r["tokens_per_second"] for r in steady) if steady else None,
    }


def finished_document(run: RunDir, step: int) -> dict[str, Any]:
    """The summary of a run that has nothing left to train, as it stands; schema mpctl.run/1."""
    try:
        summary = json.loads((run.path / "summary.json").read_text("utf-8"))
    except (OSError, ValueError):
        summary = None
    known = isinstance(summary, dict) and summary.get("schema") == "mpctl.run/1"
    return summary if known else {
        "schema": "mpctl.run/1", "status": "finished", "steps": step, "checkpoint": step
    }  # fmt: skip


def write_summary(run: RunDir, summary: dict[str, Any]) -> None:
    path = run.path / "summary.json"
    write_whole(path, json.dumps(summary, indent=1) + "\n")


def _failure(outcome: RunOutcome) -> dict[str, Any]:
    failure = outcome.failure
    assert failure is not None
    return {"rank": failure.rank, "coords": failure.coords, "error": failure.error,
            "doing": failure.doing, "log": failure.log,
            "last_lines": list(failure.last_lines)}  # fmt: skip


def _comparison(plan: Plan, launch: LaunchPlan) -> list[dict[str, Any]]:
    """For every rank that finished: parameters and bytes of a step, planned and measured."""
    plan = plan_as_launched(plan)
    topology, estimate = plan.topology, plan.estimate
    if topology is None or estimate is None:
        return []
    return [_rank_comparison(account, topology, plan) for account in launch.run.documents("ranks")]


def _rank_comparison(account: dict[str, Any], topology: Topology, plan: Plan) -> dict[str, Any]:
    assert plan.estimate is not None
    stage = topology.coords(account["rank"])["pp"]
    planned = planned_traffic(plan.estimate.messages[stage])
    parameters = plan.estimate.memory[stage].parameters
    agrees = planned == account["step_traffic"] and parameters == account["parameters"]
    validation = _validation(account, topology, plan)
    agrees &= validation is None or validation["planned"] == validation["measured"]
    memory = memory_beside(plan.estimate.memory[stage], account.get("step_memory") or {})
    agrees &= all(memory[kind]["planned"] == memory[kind]["measured"]
                  for kind in STATES if kind in memory)  # fmt: skip
    return {
        "rank": account["rank"],
        "agrees": agrees,
        "parameters": {"planned": parameters, "measured": account["parameters"]},
        "step_traffic": {"planned": planned, "measured": account["step_traffic"]},
        "validation_traffic": validation,
        "peak_memory_bytes": account["peak_memory_bytes"],
        "memory": memory,
    }


def _validation(account: dict[str, Any], topology: Topology, plan: Plan) -> dict[str, Any] | None:
    """Messages of the last validation, planned and measured; None of a run without one."""
    measured = account.get("validation")
    if measured is None:
        return None
    assert plan.estimate is not None
    place = topology.coords(account["rank"])
    planned = plan.estimate.validation(place["pp"], place["dp"], measured["samples"])
    return {"planned": planned_traffic(planned), "measured": measured["traffic"]}


def plan_as_launched(plan: Plan) -> Plan:
    """The plan of what runs here, whatever software the job was planned for."""
    job = plan.job
    if is_launched(job.training.runtime):
        return plan
    training = job.training.model_copy(update={"runtime": OWN_RUNTIME})
    return make_plan(job.model_copy(update={"training": training}))


def memory_beside(planned: StageMemory, found: dict[str, int | None]) -> dict[str, Any]:
    """Bytes of one watched step by kind: states must be equal, the rest stands beside; what was
    not counted is left out."""
    names = {**STATES, "activations": "activation_bytes", "peak": "allocated_bytes"}
    return {
        kind: {"planned": getattr(planned, name), "measured": found[kind]}
        for kind, name in names.items() if found.get(kind) is not None
    }  # fmt: skip


def planned_traffic(messages: tuple[Message, ...]) -> dict[str, dict[str, int]]:
    """A stage's messages in the form in which a rank counts them."""
    traffic: dict[str, dict[str, int]] = {}
    for message in messages:
        entry = traffic.setdefault(f"{message.axis} {message.kind}", {"count": 0, "bytes": 0})
        entry["count"] += message.count
        entry["bytes"] += message.count * message.bytes
    return dict(sorted(traffic.items()))
