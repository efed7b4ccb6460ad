"""Which world a process is part of, from what each program sets in its environment."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from mpctl.core.errors import InputError, Issue
from mpctl.run.clusters.torchrun.world import (
    JoinedProcess,
    JoinedWorld,
    find_world,
    host_of,
    require_world,
    task_counts,
    world_issues,
)
from mpctl.run.hosts.machine import HostFacts, Machine
from tests.run.clusters.kubernetes.jobs import kubernetes_job
from tests.run.clusters.torchrun.processes import Environment, mpi_process, pod, pytorch_pod, task, torchrun_world


def found(environment: Environment) -> JoinedWorld:
    world = find_world(environment)
    assert world is not None
    return world


def numbers(world: JoinedWorld) -> tuple[int, ...]:
    return (world.size, world.process, world.nodes, world.node, world.per_node, world.local)


@pytest.mark.parametrize(
    ("environment", "starter"), [(torchrun_world(6), "torchrun"), (task(6), "srun"), (mpi_process(6), "mpirun")]
)
def test_a_process_a_rank(environment: Environment, starter: str) -> None:
    world = found(environment)
    assert (world.starter, world.level, world.ranks_per_node) == (starter, "rank", None)
    assert numbers(world) == (8, 6, 2, 1, 4, 2)
    assert not world.is_first


@pytest.mark.parametrize(
    ("environment", "starter", "ranks"),
    [
        (pod(1), "Kubeflow", 4),
        (pytorch_pod(1), "Kubeflow", 4),  # RANK 1 of WORLD_SIZE 8 is node 1, with ranks 4 to 7
        (pod(1, 2, "auto"), "Kubeflow", None),
        (task(1, per_node=1), "srun", None),
        (mpi_process(1, per_node=1), "mpirun", None),
    ],
)
def test_a_process_a_node(environment: Environment, starter: str, ranks: int | None) -> None:
    world = found(environment)
    assert (world.starter, world.level, world.ranks_per_node) == (starter, "node", ranks)
    assert numbers(world) == (2, 1, 2, 1, 1, 0)


def test_torchrun_inside_of_a_pod_or_a_step_is_the_innermost() -> None:
    for outer in (pytorch_pod(1), task(1, per_node=1)):
        world = found({**outer, **torchrun_world(6)})
        assert (world.starter, world.process) == ("torchrun", 6)


def test_a_step_is_smaller_than_its_job() -> None:
    world = found(task(3, nodes=1))
    assert (world.size, world.nodes) == (4, 1)  # SLURM_NTASKS 64, SLURM_NNODES 16


def test_a_shell_in_an_allocation_is_no_world_unless_asked_for() -> None:
    shell = task(0, nodes=1, per_node=1)
    assert find_world(shell) is None
    assert require_world(shell).size == 1
    batch_script = {name: value for name, value in shell.items() if "STEP" not in name}
    assert find_world(batch_script) is None


def test_nothing_set_is_no_world() -> None:
    assert find_world({"RANK": "0", "MASTER_ADDR": "x"}) is None
    with pytest.raises(InputError, match="not part of a world"):
        require_world({})


def test_every_variable_that_is_missing_or_wrong_is_named() -> None:
    environment = {**torchrun_world(6), "RANK": "six"}
    del environment["GROUP_RANK"]
    with pytest.raises(InputError) as caught:
        find_world(environment)
    assert [issue.where for issue in caught.value.issues] == ["RANK", "GROUP_RANK"]


def test_a_changing_number_of_nodes_is_refused() -> None:
    with pytest.raises(InputError, match="1:4"):
        find_world({**pod(0), "PET_NNODES": "1:4"})
    assert found({**pod(0), "PET_NNODES": "2:2"}).nodes == 2


def test_the_first_process_speaks_for_all() -> None:
    worlds = [found(torchrun_world(rank)) for rank in range(8)]
    assert [world.is_first for world in worlds] == [True, *[False] * 7]


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("", []), ("4(x", [])])
def test_slurms_counts_of_tasks(text: str, counts: list[int]) -> None:
    assert task_counts(text) == counts


def test_a_step_with_uneven_nodes_has_its_own_count_on_each() -> None:
    uneven = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    assert found({**task(0), **uneven}).per_node == 2
    assert found({**task(4), **uneven}).per_node == 1


JOB = kubernetes_job()  # 2 nodes of 4 ranks


def issues(environment: Environment) -> list[Issue]:
    world = find_world(environment)
    assert world is not None
    return world_issues(world, JOB)


def test_the_planned_world_passes() -> None:
    for process in range(8):
        for environment in (torchrun_world(process), task(process), mpi_process(process)):
            assert issues(environment) == []
    for node in range(2):
        for environment in (
            pod(node),
            pytorch_pod(node),
            pod(node, 2, "gpu"),
            task(node, 2, 1),
            mpi_process(node, 2, 1),
        ):
            assert issues(environment) == []


def test_everything_that_differs_is_reported_at_once() -> None:
    found = issues(torchrun_world(0, nodes=3, per_node=2))
    assert [issue.where for issue in found] == ["WORLD_SIZE / LOCAL_WORLD_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
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


@pytest.mark.parametrize(("quota", "cores"), [(None, 4), (3.5, 3)])
def test_processes_of_a_host_share_its_quota(quota: float | None, cores: int) -> None:
    """Each is bound to cores of its own."""
    world = found(torchrun_world(0))
    processes = [JoinedProcess.of({"world": asdict(world), "cores": pair, "quota": quota}) for pair in ([0, 1], [2, 3])]
    fact = HostFacts("n1", Machine(2, 0, 2**30), "", "", "", "")
    assert host_of(processes, [fact, fact]).machine.cores == cores
