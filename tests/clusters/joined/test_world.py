"""Which world a process is part of, from what each program sets in its environment."""

from __future__ import annotations

import pytest

from mpctl.clusters.joined.world import JoinedWorld, find_world, require_world, task_counts
from mpctl.errors import InputError
from tests.clusters.joined.worlds import (
    Environment,
    mpi_process,
    pod,
    pytorch_pod,
    task,
    torchrun_world,
)


def found(environment: Environment) -> JoinedWorld:
    world = find_world(environment)
    assert world is not None
    return world


def numbers(world: JoinedWorld) -> tuple[int, ...]:
    return (world.size, world.process, world.nodes, world.node, world.per_node, world.local)


@pytest.mark.parametrize(
    ("environment", "starter"),
    [(torchrun_world(6), "torchrun"), (task(6), "srun"), (mpi_process(6), "mpirun")],
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
        (pytorch_pod(1), "Kubeflow", 4),
        (pod(1, 2, "auto"), "Kubeflow", None),
        (task(1, per_node=1), "srun", None),
        (mpi_process(1, per_node=1), "mpirun", None),
    ],
)
def test_a_process_a_node(environment: Environment, starter: str, ranks: int | None) -> None:
    world = found(environment)
    assert (world.starter, world.level, world.ranks_per_node) == (starter, "node", ranks)
    assert numbers(world) == (2, 1, 2, 1, 1, 0)


def test_the_rank_of_a_pytorch_job_is_that_of_its_node() -> None:
    """RANK 1 of WORLD_SIZE 8 would be rank 1; it is node 1, whose ranks are 4 to 7."""
    assert found(pytorch_pod(1)).level == "node"


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


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("", []), ("4(x", [])]
)
def test_slurms_counts_of_tasks(text: str, counts: list[int]) -> None:
    assert task_counts(text) == counts


def test_a_step_with_uneven_nodes_has_its_own_count_on_each() -> None:
    uneven = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    assert found({**task(0), **uneven}).per_node == 2
    assert found({**task(4), **uneven}).per_node == 1
