"""A rehearsal: chosen ranks of a job of any size, in one process of this machine, compared with the
plan.

The other process is `mpctl.train.rehearsal.worker`: it reads the job from a file and prints one JSON
line a rank. Here each rank is compared with the plan of its stage: parameters, the bytes of
parameters, gradients and optimizer, and every collective must be equal. Activations and the peak
are compared with the plan's estimate. Whether a rank fits is decided as for a plan: the larger of
the peaks of a step and of building the model, with what the allocator reserves and the libraries'
context, must leave the cluster's headroom of the device's memory. No data are read and no rank is
started.

By hand: a peak of 70 GiB, 5 % slack and a context of 0.5 GiB take 74 of a device's 80 GiB: with 5 %
headroom, 76 GiB usable, the rank fits. Of 1024 ranks, tp 8, pp 16, dp 8, order tp-cp-dp-pp, the 16
ranks 0, 64, .. 960 represent all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Required, cast

from typing_extensions import TypedDict

from mpctl.core.errors import DOES_NOT_FIT, InputError, Issue, RunFailed
from mpctl.core.topology import Topology
from mpctl.plan.estimate.job import Estimate
from mpctl.plan.estimate.memory import overhead_bytes
from mpctl.plan.planning.plan import Plan
from mpctl.records.rundir.rank_files import RehearsedRank, RehearsedRankHead, StepAudit
from mpctl.records.rundir.summary import STATES, PlannedMeasured, TrafficComparison
from mpctl.run.hosts.machine import Machine
from mpctl.run.launch.launch_plan import resolved_job
from mpctl.run.launch.preflight import check_here, not_of_program
from mpctl.run.launch.summary import plan_as_launched, planned_traffic
from mpctl.spec.job import JobSpec

MACHINE_RULES = (
    "world-fits-machine",
    "world-fits-memory",
    "copies-fit-memory",
    "nodes-on-host",
    "ranks-can-meet",
    "no-data",
    "adapter-packed-base",
)
"""Rules of a launch on this machine that a rehearsal skips."""
LAW = (
    "only some of a step's micro batches were run: the most in flight at once, and two more "
    "rounds. Each sent the same, so a step's messages are those sent once a step + micro batches "
    "x those of one micro batch"
)


class RankAudit(TypedDict, total=False):
    """audit: kernels and bytes by module and pass, where they were asked for."""

    audit: StepAudit


class RankRehearsal(RehearsedRankHead, RankAudit, total=False):
    """One rank compared with the plan; a rank that failed has only what RehearsedRankHead has,
    `agrees` and `over_bytes`.

    agrees: parameters, collectives and the bytes of the states are as planned; state_bytes:
    parameters, gradients and optimizer; at_peak: bytes by kind at the step's peak; device_bytes:
    what the rank takes of its device at most, allocator and context included; over_bytes: by how
    much that exceeds the device's memory less the headroom, 0 when it fits, None when that is not
    known; host_syncs: where a step makes the host wait for its device, except to read its figures,
    as `file:line: why`.
    """

    agrees: Required[bool]
    over_bytes: Required[int | None]
    parameters: PlannedMeasured
    step_traffic: TrafficComparison
    state_bytes: dict[str, PlannedMeasured]
    activation_bytes: PlannedMeasured
    peak_bytes: PlannedMeasured
    at_peak: dict[str, int]
    building_bytes: int
    device_bytes: int
    host_syncs: list[str]


class RehearsalDocument(TypedDict):
    """Output of `mpctl launch --rehearse --json`. fits: whether every rank leaves the headroom of its device's memory,
    None when no device is known; kind: cpu or cuda; dtype: of the job; law: formula of a step's messages from those of
    the micro batches that were run."""

    schema: Literal["mpctl.rehearsal/2"]
    agrees: bool
    fits: bool | None
    world_size: int
    sizes: dict[str, int]
    kind: str
    dtype: str
    device: str | None
    device_memory_bytes: int | None
    headroom_percent: float
    law: str
    ranks: list[RankRehearsal]
    seconds: float
    command: str


OnRank = Callable[[RankRehearsal], None]


def check_rehearsal(plan: Plan, machine: Machine) -> list[Issue]:
    """Return the issues that would stop the launch on any machine."""
    if issues := not_of_program(plan.job, "a rehearsal runs"):
        return issues
    return [issue for issue in check_here(plan, machine) if issue.rule not in MACHINE_RULES]


def chosen_ranks(topology: Topology, rank: int | None) -> list[int]:
    """[rank], or the first rank of each stage when it is None. Raises InputError for a rank that
    the world does not have."""
    if rank is None:
        return [topology.rank(pp=s) for s in range(topology.sizes["pp"])]
    if not 0 <= rank < topology.world_size:
        size = topology.world_size
        message = f"there is no rank {rank} in a world of {size}"
        raise InputError.of("rank-in-world", "--rank", message, f"use 0 to {size - 1}")
    return [rank]


def rehearse(
    plan: Plan, machine: Machine, ranks: Sequence[int], *, command: str, on_rank: OnRank, audits: bool = False
) -> RehearsalDocument:
    """Rehearse these ranks, one after the other. command: the command line, for the document;
    on_rank: called with each rank when it is done; audits: count the kernels and bytes of a step
    as well. Raises RunFailed when the process ends early, InputError for an audit of a job on CPU.
    """
    began, job = time.perf_counter(), resolved_job(plan, machine)
    estimate = plan_as_launched(plan).estimate
    if estimate is None:
        raise InputError.of("no-model", "model", "a rehearsal needs a model", "add --model NAME")
    rows: list[RankRehearsal] = []
    if audits and job.launch.device != "cuda":
        message = f"an audit counts the kernels of a GPU, the job runs on {job.launch.device}"
        hint = "add --device cuda: no GPU is needed for it"
        raise InputError.of("audit-needs-gpu", "launch.device", message, hint)
    for rehearsed in _rehearsed_ranks(job, ranks, audits):
        rows.append(_compare(rehearsed, estimate))
        on_rank(rows[-1])
    device = job.cluster.device
    excesses = [row["over_bytes"] for row in rows if row["over_bytes"] is not None]
    return {
        "schema": "mpctl.rehearsal/2",
        "agrees": all(row["agrees"] for row in rows),
        "fits": not any(excesses) if excesses else None,
        "world_size": job.world_size,
        "sizes": job.sizes,
        "kind": job.launch.device,
        "dtype": plan.job.training.dtype,
        "device": None if device is None else device.name,
        "device_memory_bytes": None if device is None else device.memory_bytes,
        "headroom_percent": job.cluster.headroom,
        "law": LAW,
        "ranks": rows,
        "seconds": time.perf_counter() - began,
        "command": command,
    }


def exit_code(document: RehearsalDocument) -> int:
    """0 when the job would run as planned, 1 when a rank failed or differs from the plan, 3 when
    a rank leaves less than the headroom of its device's memory."""
    if not document["agrees"]:
        return 1
    return DOES_NOT_FIT if document["fits"] is False else 0


def _rehearsed_ranks(job: JobSpec, ranks: Sequence[int], audits: bool) -> Iterator[RehearsedRank]:
    """Yield the output of the process about each rank, in order."""
    env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
    with tempfile.TemporaryDirectory(prefix="mpctl-rehearsal-") as folder:
        path, log = Path(folder) / "job.json", Path(folder) / "log"
        path.write_text(job.model_dump_json(), "utf-8")
        words = [*["--audit"][:audits], str(os.getpid()), str(path), *map(str, ranks)]
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "mpctl.train.rehearsal.worker", *words],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
            )
        try:
            for rank in ranks:
                line = process.stdout.readline() if process.stdout else ""
                if not line.endswith("\n"):
                    last = log.read_text("utf-8", errors="replace").strip().splitlines()[-1:]
                    raise RunFailed(
                        f"the rehearsal of rank {rank} ended with exit code {process.wait()}: "
                        f"{''.join(last) or 'it printed no error'}"
                    )
                yield json.loads(line)
        finally:
            process.kill()
            process.wait()


def _compare(rank: RehearsedRank, estimate: Estimate) -> RankRehearsal:
    """One rank compared with the plan of its stage."""
    head: RehearsedRankHead = {
        "rank": rank["rank"],
        "coords": rank["coords"],
        "micro_batches": rank["micro_batches"],
        "micro_batches_run": rank["micro_batches_run"],
        "seconds": rank["seconds"],
        "failure": rank["failure"],
    }
    if rank["failure"] is not None:
        return cast(RankRehearsal, {**head, "agrees": False, "over_bytes": None})
    stage = rank["coords"]["pp"]
    memory, messages = estimate.expected_memory[stage], estimate.messages[stage]
    parameters = _pair(memory.parameters, rank["parameters"])
    traffic: TrafficComparison = {"planned": planned_traffic(messages), "measured": rank["step_traffic"]}
    states = {kind: _pair(getattr(memory, attribute), rank["state_bytes"][kind]) for kind, attribute in STATES.items()}
    audited: RankAudit = {"audit": rank["audit"]} if "audit" in rank else {}
    exact = (parameters, traffic, *states.values())
    most = max(rank["peak_bytes"], rank["building_bytes"]) + memory.workspace_bytes
    taken = most + sum(overhead_bytes(estimate.layout, most)) + memory.communicator_bytes
    usable = estimate.layout.job.cluster.usable_bytes
    return {
        **head,
        **audited,
        "host_syncs": rank["host_syncs"],
        "parameters": parameters,
        "step_traffic": traffic,
        "state_bytes": states,
        "agrees": all(pair["planned"] == pair["measured"] for pair in exact),
        "activation_bytes": _pair(memory.activation_bytes, rank["activation_bytes"]),
        "peak_bytes": _pair(memory.tensor_bytes, rank["peak_bytes"]),
        "at_peak": rank["at_peak"],
        "building_bytes": rank["building_bytes"],
        "device_bytes": taken,
        "over_bytes": None if usable is None else max(0, taken - usable),
    }


def _pair(planned: int, measured: int) -> PlannedMeasured:
    return {"planned": planned, "measured": measured}
