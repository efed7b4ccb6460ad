"""What a scheduler is asked for is what the ranks of the submitted job use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpctl.plan.planning.plan import make_plan
from mpctl.records.rundir.directory import RunDir
from mpctl.run.clusters.kubernetes.manifest import pod_template
from mpctl.run.clusters.slurm.submission import Submission
from mpctl.run.hosts.machine import Machine
from mpctl.run.launch.launch_plan import plan_launch, resolved_job
from mpctl.spec.load import parse
from tests.run.clusters.kubernetes.jobs import kubernetes_job

LAPTOP, NODE = Machine(2, 0, 2**34), Machine(64, 0, 2**40)


@pytest.mark.parametrize("threads", [3, None])
def test_threads_of_a_rank_stay_as_in_the_job(tmp_path: Path, threads: int | None) -> None:
    """A submitted job wrote none, so that its ranks took all cores of their hosts in place of those
    that the batch script or the pod had asked for."""
    job = kubernetes_job(device="cpu")
    launch = job.launch.model_copy(update={"threads_per_rank": threads})
    plan = make_plan(job.model_copy(update={"launch": launch}))
    launched = plan_launch(plan, RunDir(tmp_path), LAPTOP, hosts=2, is_submitted=True)
    written = parse(json.loads(launched.files["job.json"]))
    assert written.launch.threads_per_rank == threads
    assert (written.launch.device, written.launch.on) == ("cpu", "auto")
    there = resolved_job(make_plan(written), NODE, hosts=2).launch.threads_per_rank
    assert there == (threads or 16)  # 64 cores for 4 ranks
    ranks = 4
    assert Submission(plan, [], {}).cpus == (threads and ranks * threads)
    pod = pod_template(plan, tmp_path, name="llama")
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"]["cpu"] == str(ranks * (threads or 1))
