"""Random small jobs: the plan's bytes, and the losses of one process.

Rehearsed peaks lie between 90 and 103 % of the plan: the lowest of the twelve, 92 %, has latent
attention and a tied table. Trained ones, of other dates, may be down to 80 %.

Two jobs of each kind are rehearsed in every run of the tests, of two layers and one or two micro
batches: 18 s of processor time for all. The slow tests train 60 that change with the date;
`MPCTL_JOBS=20261127 pytest -m slow tests/train/runtime/test_random_jobs.py` repeats those of a day, which
are printed with a failure.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mpctl.model.layout.topology import job_topology
from mpctl.records.rundir.summary import STATES
from mpctl.run.launch.summary import planned_traffic
from mpctl.spec.load import load_job, parse
from mpctl.train.rehearsal.worker import rehearse_rank
from tests.ranks import run_ranks
from tests.train.runtime.random_jobs import KINDS, random_job
from tests.train.runtime.tiny import make_trainer

LEAST, LEAST_REHEARSED, MOST = 0.8, 0.9, 1.03
SEED = os.environ.get("MPCTL_JOBS") or f"{datetime.now(UTC):%Y%m%d}"


@pytest.mark.parametrize("number", range(2 * len(KINDS)))
def test_a_rehearsal_takes_what_is_planned(number: int) -> None:
    _, job, plan = random_job("rehearsed", number, is_small=True)
    assert plan.estimate is not None
    topology = job_topology(job)
    for stage, memory in enumerate(plan.estimate.expected_memory):
        account = rehearse_rank(job, topology, topology.rank(pp=stage))
        assert account["failure"] is None, "".join(account["failure"]["traceback"])
        assert account["state_bytes"] == {k: getattr(memory, v) for k, v in STATES.items()}
        assert LEAST_REHEARSED <= account["peak_bytes"] / memory.tensor_bytes <= MOST


def _trained(rank: int, size: int, raw: dict[str, Any], run_dir: str) -> dict[str, Any]:
    trainer = make_trainer(parse(raw), Path(run_dir), rank)
    return {
        "losses": [record["loss"] for record in trainer.run()],
        "memory": trainer.memory_watch.measured,
        "traffic": trainer.step_traffic,
        "stage": trainer.mesh.coords["pp"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("number", range(60))
def test_a_random_job_trains_as_planned(data: Path, tmp_path: Path, number: int) -> None:
    print(f"MPCTL_JOBS={SEED}, job {number}")
    settings, job, plan = random_job(SEED, number, str(data))
    print(settings)
    assert plan.estimate is not None
    ranks = run_ranks(_trained, job.world_size, job.model_dump(mode="json"), str(tmp_path))
    for rank in ranks:
        memory, found = plan.estimate.expected_memory[rank["stage"]], rank["memory"]
        assert rank["traffic"] == planned_traffic(plan.estimate.messages[rank["stage"]])
        assert {k: found[k] for k in STATES} == {k: getattr(memory, v) for k, v in STATES.items()}
        assert LEAST <= found["peak"] / memory.tensor_bytes <= MOST
    if job.training.dtype != "fp64":
        return
    alone = load_job(None, {**settings, **ONE_RANK})
    (one,) = run_ranks(_trained, 1, alone.model_dump(mode="json"), str(tmp_path / "one"))
    assert ranks[0]["losses"] == pytest.approx(one["losses"], rel=1e-9)


ONE_RANK = {
    "parallel.tp": 1,
    "parallel.cp": 1,
    "parallel.dp": 1,
    "parallel.pp": 1,
    "parallel.vpp": 1,
    "parallel.ep": 1,
    "parallel.etp": 1,
    "parallel.zero": 0,
    "parallel.schedule": "1f1b",
    "parallel.sequence_parallel": False,
    "cluster.gpus_per_node": 1,
}
