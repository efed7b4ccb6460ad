"""A rehearsal: chosen ranks of a job of any size in one process of this machine, beside the plan.

The other process is `mpctl.rehearsal.rehearse`: it gets the job as a file and gives one JSON line a
rank. Here each is held against what the plan says of its stage: parameters, the bytes of the states
and every collective must be equal; the activations and the peak stand beside the plan's estimate,
and what a step, or the building before it, takes at most is held against the device's memory. No
data are read and no rank is started.

By hand: 1024 ranks, tp 8, pp 16, dp 8, order tp-cp-dp-pp: the 16 ranks 0, 64, .. 960 stand for all.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mpctl.errors import DOES_NOT_FIT, InputError, Issue, RunFailed
from mpctl.launch.launch_plan import resolved
from mpctl.launch.machine import Machine
from mpctl.launch.preflight import check_launch
from mpctl.launch.summary import STATES, plan_as_launched, planned_traffic
from mpctl.planning.plan import Plan
from mpctl.spec.job import JobSpec
from mpctl.topology import Topology

# What a launch asks of this machine and a rehearsal does not.
OF_THE_MACHINE = ("world-fits-machine", "world-fits-memory", "nodes-on-host", "ranks-can-meet",
                  "no-data")  # fmt: skip
LAW = (
    "fewer micro batches were run than a step has: the most in flight, and two more rounds; each "
    "sent the same, so a step's messages are those of once a step + micro batches x those of one"
)
OnAccount = Callable[[dict[str, Any]], None]


def check_rehearsal(plan: Plan, machine: Machine) -> list[Issue]:
    """What would stop the launch wherever it is."""
    return [issue for issue in check_launch(plan, machine) if issue.rule not in OF_THE_MACHINE]


def chosen_ranks(topology: Topology, rank: int | None) -> list[int]:
    """The rank asked for, or the first of each stage."""
    if rank is None:
        return [topology.rank(tp=0, cp=0, dp=0, pp=s) for s in range(topology.sizes["pp"])]
    if not 0 <= rank < topology.world_size:
        size = topology.world_size
        message = f"{rank} is not in a world of {size}"
        raise InputError.of("rank-in-world", "--rank", message, f"use 0 to {size - 1}")
    return [rank]


def rehearse(
    plan: Plan, machine: Machine, ranks: Sequence[int], *, on_account: OnAccount
) -> dict[str, Any]:
    """Schema mpctl.rehearsal/1; on_account is told of each rank as it is done."""
    began, job = time.perf_counter(), resolved(plan, machine)
    plan = plan_as_launched(plan)
    found = []
    for account in _accounts(job, ranks):
        found.append(_beside_plan(account, plan))
        on_account(found[-1])
    device = job.cluster.device
    known = [rank["over_bytes"] for rank in found if rank["over_bytes"] is not None]
    return {
        "schema": "mpctl.rehearsal/1",
        "agrees": all(rank["agrees"] for rank in found),
        "fits": not any(known) if known else None,
        "world_size": job.world_size,
        "sizes": job.sizes,
        "kind": job.launch.device,
        "device": None if device is None else device.name,
        "device_memory_bytes": None if device is None else device.memory_bytes,
        "law": LAW,
        "ranks": found,
        "seconds": time.perf_counter() - began,
        "command": shlex.join([sys.executable, "-m", "mpctl", *sys.argv[1:]]),
    }


def exit_code(document: dict[str, Any]) -> int:
    """0 where the job would run as planned, 1 where a rank failed or differs from the plan, else
    that of a job that does not fit."""
    if not document["agrees"]:
        return 1
    return DOES_NOT_FIT if document["fits"] is False else 0


def _accounts(job: JobSpec, ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """What the process says of each rank, in order; raises RunFailed when it ends without."""
    with tempfile.TemporaryDirectory(prefix="mpctl-rehearsal-") as folder:
        path, log = Path(folder) / "job.json", Path(folder) / "log"
        path.write_text(job.model_dump_json(), "utf-8")
        command = [sys.executable, "-m", "mpctl.rehearsal.rehearse", str(path), *map(str, ranks)]
        env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
        with log.open("wb") as errors:
            process = subprocess.Popen(
                command, env={**os.environ, **env}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8",
            )  # fmt: skip
        try:
            yield from _read(process, ranks, log)
        finally:
            process.kill()
            process.wait()


def _read(
    process: subprocess.Popen[str], ranks: Sequence[int], log: Path
) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for rank in ranks:
        line = process.stdout.readline()
        if not line.endswith("\n"):
            last = log.read_text("utf-8", errors="replace").strip().splitlines()[-1:]
            raise RunFailed(f"the rehearsal of rank {rank} ended with exit code {process.wait()}: "
                            f"{''.join(last) or 'without a word'}")  # fmt: skip
        yield json.loads(line)


def _beside_plan(account: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """One rank as it is reported; one that failed has only its failure."""
    shown = {key: account[key] for key in (
        "rank", "coords", "micro_batches", "micro_batches_run", "seconds", "failure",
    )}  # fmt: skip
    if account["failure"] is not None:
        return {**shown, "agrees": False, "over_bytes": None}
    assert plan.estimate is not None
    stage = account["coords"]["pp"]
    memory = plan.estimate.memory[stage]
    exact = {
        "parameters": _pair(memory.parameters, account["parameters"]),
        "step_traffic": _pair(
            planned_traffic(plan.estimate.messages[stage]), account["step_traffic"]
        ),
        "state_bytes": {
            kind: _pair(getattr(memory, name), account["state_bytes"][kind])
            for kind, name in STATES.items()
        },
    }
    pairs = (exact["parameters"], exact["step_traffic"], *exact["state_bytes"].values())
    return {
        **shown, **exact,
        "agrees": all(pair["planned"] == pair["measured"] for pair in pairs),
        "activation_bytes": _pair(memory.activation_bytes, account["activation_bytes"]),
        "peak_bytes": _pair(memory.allocated_bytes, account["peak_bytes"]),
        "at_peak": account["at_peak"],
        "building_bytes": account["building_bytes"],
        "over_bytes": _over(max(account["peak_bytes"], account["building_bytes"]), plan.job),
    }  # fmt: skip


def _pair(planned: Any, measured: Any) -> dict[str, Any]:
    return {"planned": planned, "measured": measured}


def _over(peak: int, job: JobSpec) -> int | None:
    """Bytes by which a rank does not fit; None where the device is not known."""
    device = job.cluster.device
    return None if device is None else max(0, peak - device.memory_bytes)
