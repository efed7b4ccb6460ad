"""The allocation in the environment, its nodes, its step, the variables that must not leak."""

from __future__ import annotations

import time

import pytest

from mpctl.core.errors import InputError
from mpctl.run.clusters.slurm.allocation import (
    MOST_NODES,
    Allocation,
    agents_step,
    allocation_issues,
    expand_node_list,
    find_allocation,
    is_in_allocation,
    read_addresses,
    step_environment,
)

BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_NTASKS": "3",
    "SLURM_NTASKS_PER_NODE": "1",
}
ALLOCATION = Allocation("7", ("n1", "n2", "n3"), gpus=4)


def test_an_allocation_is_found() -> None:
    assert find_allocation(BATCH) == ALLOCATION
    old = {"SLURM_JOBID": "7", "SLURM_NODELIST": "n2,n1"}  # the order is the list's
    assert find_allocation(old) == Allocation("7", ("n2", "n1"))
    step = find_allocation({**old, "SLURM_STEP_NUM_TASKS": "2"})
    assert step is not None and step.tasks_here == 2


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "7"}, {"SLURM_CONF": "/etc/x"}])
def test_without_one_there_is_none(environment: dict[str, str]) -> None:
    assert find_allocation(environment) is None


def test_an_allocation_is_used_where_the_plan_has_several_nodes_or_this_host_is_none_of_it() -> None:
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
        "SLURM_NTASKS": "7",
        "SLURM_HOSTFILE": "h",
        "SLURM_DISTRIBUTION": "arbitrary",
        "SLURM_CPU_BIND": "cores",
        "SLURM_MEM_PER_CPU": "1",
        "SLURM_MEM_PER_NODE": "2",
        "SLURM_EXPORT_ENV": "NONE",
        "SLURM_STEP_ID": "0",
        "SRUN_CPUS_PER_TASK": "3",
        "SLURMD_NODENAME": "n1",
    }
    kept = {"SLURM_CONF": "/c", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "HOME": "/root"}
    assert step_environment({**kept, **leaks}) == kept


# as `scontrol show hostnames` expands them (compared in tests/multinode)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("gpu[003-005,7],login1", ["gpu003", "gpu004", "gpu005", "gpu7", "login1"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("rack[0-1]n[1-2]-ib", ["rack0n1-ib", "rack0n2-ib", "rack1n1-ib", "rack1n2-ib"]),
        ("b,a,b2", ["b", "a", "b2"]),
        ("n2,n1", ["n2", "n1"]),
    ],
)
def test_a_list_is_expanded_in_its_order(text: str, names: list[str]) -> None:
    assert expand_node_list(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,",
        ",a",
        "a,,b",
        "a b",
        "n[1-",
        "n]",
        "n[]",
        "n[1,]",
        "n[3-1]",
        "n[1]]",
        "n[a-b]",
        "n[1-2-3]",
        "n[-1]",
        "n\n",
        "n[[1]]",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not a list of nodes"):
        expand_node_list(text)


@pytest.mark.parametrize("text", [f"n[1-{MOST_NODES + 1}]", "a[1-999]b[1-999]", f"n[0-{9**18}]"])
def test_a_list_has_a_bound(text: str) -> None:
    with pytest.raises(InputError, match="more than 65,536 nodes"):
        expand_node_list(text)


def test_a_thousand_nodes_take_no_time() -> None:
    start = time.process_time()
    assert len(expand_node_list(",".join(f"rack{n}[001-010]" for n in range(100)))) == 1000
    assert time.process_time() - start < 1


def test_addresses_of_nodes() -> None:
    listing = "n1|10.0.0.1\nn1|10.0.0.1\nn2|n2.cluster\n\nn3|\n"
    assert read_addresses(listing) == {"n1": "10.0.0.1", "n2": "n2.cluster"}
