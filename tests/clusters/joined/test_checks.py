"""A world that is not the planned one is refused, with everything that differs and ways out."""

from __future__ import annotations

import pytest

from mpctl.clusters.joined.checks import world_issues
from mpctl.clusters.joined.world import find_world
from mpctl.errors import Issue
from tests.clusters.joined.worlds import (
    Environment,
    mpi_process,
    pod,
    pytorch_pod,
    task,
    torchrun_world,
)
from tests.clusters.kubernetes.jobs import kubernetes_job

JOB = kubernetes_job()  # 2 nodes of 4 ranks


def issues(environment: Environment) -> list[Issue]:
    world = find_world(environment)
    assert world is not None
    return world_issues(world, JOB)


@pytest.mark.parametrize("process", range(8))
def test_the_planned_world_passes_with_a_process_a_rank(process: int) -> None:
    for environment in (torchrun_world(process), task(process), mpi_process(process)):
        assert issues(environment) == []


@pytest.mark.parametrize("node", range(2))
def test_the_planned_world_passes_with_a_process_a_node(node: int) -> None:
    for environment in (pod(node), pytorch_pod(node), pod(node, 2, "gpu"), task(node, 2, 1),
                        mpi_process(node, 2, 1)):  # fmt: skip
        assert issues(environment) == []


def test_everything_that_differs_is_said_at_once() -> None:
    found = issues(torchrun_world(0, nodes=3, per_node=2))
    assert [issue.where for issue in found] == [
        "WORLD_SIZE / LOCAL_WORLD_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    ]  # fmt: skip
    assert "started 6 processes, but the plan has 8 ranks" in found[1].message
    for issue in found:
        assert "--nnodes=2 --nproc-per-node=4" in issue.hint
        assert "--nodes 3 --gpus-per-node 2" in issue.hint


def test_nodes_of_another_size_are_refused() -> None:
    (issue,) = issues(pod(0, 2, "8"))
    assert issue.where == "PET_NPROC_PER_NODE" and "8 ranks a node" in issue.message
    assert "--gpus-per-node 8" in issue.hint
    (issue,) = issues(pod(0, 4))
    assert issue.where == "PET_NNODES" and "--nodes 4 --gpus-per-node 4" in issue.hint


def test_a_task_a_node_is_not_taken_for_a_task_a_rank() -> None:
    """8 tasks on 8 nodes: as many as the plan has ranks, but on other nodes."""
    (issue,) = issues(task(0, nodes=8, per_node=1))
    assert issue.where == "SLURM_STEP_NUM_NODES" and "8 nodes, but the plan has 2" in issue.message


def test_processes_dealt_to_the_nodes_in_turn_are_refused() -> None:
    assert issues(task(0, cyclic=True)) == []  # the first one cannot see it
    (issue,) = issues(task(1, cyclic=True))
    assert issue.where == "SLURM_PROCID" and "rank 4" in issue.message
    assert "--distribution=block" in issue.hint
