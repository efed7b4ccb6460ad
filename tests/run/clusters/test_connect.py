"""The hosts of a bench before any is contacted: refusals, warnings, more slots than ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpctl.plan.planning.plan import Plan
from mpctl.run.clusters.connect import bench_issues, bench_warnings
from mpctl.run.hosts.machine import Machine
from mpctl.spec.load import load_job
from tests.train.runtime.tiny import settings, tiny_plan

ONE_CORE = Machine(cores=1, gpus=0, memory_bytes=2**36)


def plan_of(tp: int, **changes: Any) -> Plan:
    return tiny_plan(load_job(None, settings(tp, **changes)))


def rules(issues: list[Any]) -> list[str]:
    return [issue.rule for issue in issues]


def test_a_host_may_have_more_slots_than_a_layout_has_ranks(tmp_path: Path) -> None:
    """mpctl launch refuses that; less slots than ranks are refused here too."""
    hosts = tmp_path / "hosts"
    hosts.write_text("n1 slots=4\n")
    over = {"launch__on": "ssh", "launch__ssh__hostfile": str(hosts)}
    assert bench_issues(plan_of(2, **over), ONE_CORE, only_measures=True) == []
    hosts.write_text("n1 slots=1\n")
    assert rules(bench_issues(plan_of(2, **over), ONE_CORE, only_measures=True)) == ["slots-match-plan"]


def test_only_what_trains_needs_data() -> None:
    plan = plan_of(1)
    assert bench_issues(plan, ONE_CORE, only_measures=True) == []
    (issue,) = bench_issues(plan, ONE_CORE)
    assert "data" in issue.where


def test_cores_of_hosts_that_are_not_known_yet_are_not_warned_of(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("n1\nn2\n")
    two = {"cluster__nodes": 2, "cluster__gpus_per_node": 1, "parallel__dp": 2}
    here = plan_of(1, **two, launch__on="local")
    there = plan_of(1, **two, launch__on="ssh", launch__ssh__hostfile=str(hosts))
    said = " ".join(bench_warnings(here, ONE_CORE))
    assert "2 nodes of the plan are simulated" in said and "2 ranks share 1 core" in said
    assert bench_warnings(there, ONE_CORE) == []
