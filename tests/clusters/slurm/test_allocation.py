"""The allocation in the environment, the step in it, and the variables that must not leak."""

from __future__ import annotations

import pytest

from mpctl.clusters.slurm.allocation import (
    Allocation,
    agents_step,
    allocation_issues,
    find_allocation,
    is_in_allocation,
    step_environment,
)

BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_GPUS_ON_NODE": "4",
    "SLURM_RESTART_COUNT": "2", "SLURM_NTASKS": "3", "SLURM_NTASKS_PER_NODE": "1",
}  # fmt: skip
ALLOCATION = Allocation("7", ("n1", "n2", "n3"), gpus=4, restarts=2)


def test_an_allocation_is_found() -> None:
    assert find_allocation(BATCH) == ALLOCATION
    old = {"SLURM_JOBID": "7", "SLURM_NODELIST": "n2,n1"}  # the order is the list's
    assert find_allocation(old) == Allocation("7", ("n2", "n1"))
    step = find_allocation({**old, "SLURM_STEP_NUM_TASKS": "2"})
    assert step is not None and step.tasks_here == 2


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "7"}, {"SLURM_CONF": "/etc/x"}])
def test_without_one_there_is_none(environment: dict[str, str]) -> None:
    assert find_allocation(environment) is None


def test_an_allocation_is_used_where_the_plan_has_several_nodes_or_this_host_is_none_of_it() -> (
    None
):
    below_salloc = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}
    on_a_node = {**below_salloc, "SLURMD_NODENAME": "n1"}
    assert [is_in_allocation(below_salloc, nodes) for nodes in (1, 2)] == [True, True]
    assert [is_in_allocation(on_a_node, nodes) for nodes in (1, 2)] == [False, True]
    assert not is_in_allocation({"SLURM_JOB_ID": "7"}, 2)


def test_a_plan_must_fit_into_it() -> None:
    assert list(allocation_issues(ALLOCATION, 3, 4)) == []
    assert list(allocation_issues(ALLOCATION, 2, 0)) == []
    nodes, gpus = allocation_issues(ALLOCATION, 4, 8)
    assert nodes.message == "the plan has 4 nodes, but job 7 has 3"
    assert nodes.hint == "allocate 4 (salloc -N 4), or plan for 3: --nodes 3"
    assert "8 ranks a node need as many GPUs, but job 7 has 4" in gpus.message


def test_one_step_starts_an_agent_on_each_node() -> None:
    step = agents_step(ALLOCATION, ["n1", "n2"], ["python", "-m", "agent"])
    assert step[0] == "srun"
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=n1,n2"} <= {*step}
    assert step[-3:] == ["python", "-m", "agent"]


def test_what_srun_would_read_as_options_does_not_reach_it() -> None:
    leaks = {
        "SLURM_NTASKS": "7", "SLURM_HOSTFILE": "h", "SLURM_DISTRIBUTION": "arbitrary",
        "SLURM_CPU_BIND": "cores", "SLURM_MEM_PER_CPU": "1", "SLURM_MEM_PER_NODE": "2",
        "SLURM_EXPORT_ENV": "NONE", "SLURM_STEP_ID": "0", "SRUN_CPUS_PER_TASK": "3",
        "SLURMD_NODENAME": "n1",
    }  # fmt: skip
    kept = {"SLURM_CONF": "/c", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "HOME": "/root"}
    assert step_environment({**kept, **leaks}) == kept
