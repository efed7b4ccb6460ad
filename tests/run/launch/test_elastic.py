"""Elastic runs: the layout for the hosts that there are, and losses that stay when dp changes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from mpctl.core.errors import InputError
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.rank_files import StepRecord
from mpctl.run.hosts.machine import Machine
from mpctl.run.launch.control.cluster import AgentOrder, agent_cluster
from mpctl.run.launch.elastic import elastic_issues, fit_hosts
from mpctl.run.launch.launch_plan import plan_launch
from mpctl.run.launch.resume import job_before
from mpctl.run.launch.set_up import set_up_run
from mpctl.run.launch.supervise import RunOutcome, run_launch
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from tests.run.launch.command import Launched, wait_for
from tests.run.launch.control.agents import LocalAgents
from tests.train.runtime.tiny import tiny_job, tiny_plan


def _job(**settings: object) -> JobSpec:
    """4 nodes of 8 GPUs: tp 8, dp 4, a global batch of 12."""
    keys = {
        "cluster.nodes": 4,
        "cluster.gpus_per_node": 8,
        "parallel.tp": 8,
        "training.global_batch_size": 12,
        "launch.elastic": True,
    }
    more = {key.replace("__", "."): value for key, value in settings.items()}
    return load_job(None, {**keys, **more})


@pytest.mark.parametrize(
    ("hosts", "batch", "nodes", "dp"),
    [(4, 12, 4, 4), (3, 12, 3, 3), (2, 12, 2, 2), (1, 12, 1, 1), (3, 16, 2, 2), (9, 12, 4, 4)],
)
def test_the_largest_dp_that_divides_the_batch(hosts: int, batch: int, nodes: int, dp: int) -> None:
    job = _job(training__global_batch_size=batch)
    plan = fit_hosts(job, hosts)
    assert (plan.job.cluster.nodes, plan.job.sizes["dp"], plan.job.sizes["tp"]) == (nodes, dp, 8)
    assert plan.job.training.global_batch_size == batch
    assert plan.job.num_microbatches * dp * plan.job.training.micro_batch_size == batch


def test_a_replica_over_two_nodes_needs_whole_replicas() -> None:
    job = _job(parallel__pp=2, training__global_batch_size=8)
    assert fit_hosts(job, 3).job.cluster.nodes == 2
    with pytest.raises(InputError, match="no whole number of replicas of 16 ranks"):
        fit_hosts(job, 1)


def test_too_few_hosts_are_refused_with_the_bound() -> None:
    with pytest.raises(InputError, match=r"1 host of 4 \(launch.min_nodes is 2\)"):
        fit_hosts(_job(launch__min_nodes=2), 1)
    with pytest.raises(InputError, match="3 nodes: dp 3"):
        fit_hosts(_job(launch__min_nodes=3, training__global_batch_size=16), 3)


def test_settings_that_contradict_are_refused() -> None:
    assert elastic_issues(_job(launch__min_nodes=4)) == []
    (alone,) = elastic_issues(_job(launch__min_nodes=2, launch__elastic=False))
    assert "launch.elastic is false" in alone.message
    (many,) = elastic_issues(_job(launch__min_nodes=5))
    assert many.message == "5 is more than the 4 nodes of the job"


class Flaky(LocalAgents):
    """Agents of two hosts, the second of which cannot be started while `is_down`."""

    is_down = False

    def start(self, nodes: Sequence[int]) -> None:
        super().start([node for node in nodes if not (self.is_down and node == 1)])

    def processes_of(self, node: int) -> list[psutil.Process]:
        return psutil.Process(self.processes[node].pid).children(recursive=True)


class Elastic:
    """A run of dp 4 on two hosts: the second is killed after step 3, and is back at once when the
    run goes on without it; its ranks wait for that, so that they are not done before."""

    def __init__(self, data: Path, folder: Path) -> None:
        self.run, self.events = RunDir(folder), list[str]()
        keys = {"cluster__nodes": 2, "cluster__gpus_per_node": 2, "parallel__dp": 4}
        more = {"launch__elastic": True, "launch__max_restarts": 1, "checkpoint__interval": 2}
        plan = tiny_plan(tiny_job(data, **keys, **more))
        self.plan = plan_launch(plan, self.run, Machine(4, 0, 2**34), hosts=2)
        self.nodes: set[int] = set()

    def make_starter(self, order: AgentOrder) -> Flaky:
        self.starter = Flaky(order)
        return self.starter

    def launch(self) -> RunOutcome:
        make, event = self.make_starter, self.events.append
        with agent_cluster(["n0", "n1"], self.run, make, event, patience=60) as self.cluster:
            set_up_run(self.plan, overwrite=False, resume=False, on_progress=lambda *_: None)
            return run_launch(self.plan, self.cluster, self.on_record, event)

    def on_record(self, record: StepRecord) -> None:
        self.nodes.add(len(json.loads((self.run.nodes / "hosts.json").read_text())["hosts"]))
        if self.nodes == {2} and record["step"] == 3 and not self.starter.is_down:
            self.starter.is_down = True
            os.kill(self.starter.processes[1].pid, signal.SIGKILL)
        elif 1 in self.nodes and self.starter.is_down:
            ranks = self.starter.processes_of(0)
            for process in ranks:
                process.suspend()
            self.starter.is_down, self.cluster.next_try = False, 0.0
            wait_for(self.cluster.has_returned)
            for process in ranks:
                process.resume()


@pytest.mark.slow
def test_a_run_shrinks_and_grows_back_with_the_same_losses(data: Path, finished: Launched, tmp_path: Path) -> None:
    elastic = Elastic(data, tmp_path / "run")
    outcome, run = elastic.launch(), elastic.run
    assert outcome.status == "finished", outcome.failure
    assert [record["step"] for record in run.records()] == list(range(1, 21))
    losses = [record["loss"] for record in run.records()]
    assert losses == pytest.approx(finished.losses, rel=1e-6)
    assert elastic.nodes == {1, 2} and outcome.attempts == 3
    text = "\n".join(elastic.events)
    assert "going on with 1 host (n0) at dp 2" in text, text
    assert "going on with 2 hosts (n0, n1) at dp 4" in text, text
    assert outcome.launch is None and job_before(run).cluster.nodes == 2
