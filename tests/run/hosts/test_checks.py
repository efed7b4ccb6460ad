"""Requirements before ranks start: hosts, GPUs, memory.

What ranks of a job run on, by torch's names.

What hosts say of themselves, compared: one machine under two names.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from mpctl.core.errors import InputError, Issue
from mpctl.plan.planning.plan import make_plan
from mpctl.run.hosts import machine as machine_module
from mpctl.run.hosts.checks import doubled_hosts, host_issues, named_device, rehearsal_warnings
from mpctl.run.hosts.machine import Machine, host_facts, hosts_in, this_machine
from mpctl.run.launch.preflight import Device, chosen_device, launch_warnings
from mpctl.spec.load import load_job

HERE = Machine(cores=4, gpus=8, memory_bytes=1 << 34)
GPT = {"model": "gpt2", "training.micro_batch_size": 4, "launch.device": "cpu"}


def issues(machine: Machine, settings: dict[str, Any], device: Device = "cpu") -> list[Issue]:
    return list(host_issues(make_plan(load_job(None, settings)), machine, device))


TWO_NODES = {**GPT, "cluster.nodes": 2, "cluster.gpus_per_node": 2, "launch.check_memory": False}


def test_two_nodes_are_simulated_on_cpu_with_a_warning() -> None:
    assert issues(HERE, TWO_NODES) == []
    warnings = list(rehearsal_warnings(load_job(None, TWO_NODES), HERE))
    assert warnings == ["the 2 nodes of the plan are simulated on the CPU of this host"]
    alone = load_job(None, {**TWO_NODES, "cluster.nodes": 1})
    assert list(rehearsal_warnings(alone, HERE)) == []


def test_two_nodes_are_refused_on_gpus_with_ways_out() -> None:
    (issue,) = issues(HERE, TWO_NODES, "cuda")
    assert (issue.rule, issue.where) == ("nodes-on-host", "cluster.nodes")
    assert "the plan has 2 nodes" in issue.message and "all 4 ranks" in issue.message
    assert "--nodes 1 --gpus-per-node 8" in issue.hint and "--device cpu" in issue.hint
    assert issues(HERE, {**TWO_NODES, "cluster.nodes": 1}, "cuda") == []


def test_two_nodes_are_refused_where_a_scheduler_gave_several_hosts() -> None:
    (issue,) = issues(replace(HERE, hosts=2), TWO_NODES)
    assert "one of the 2 that the scheduler has allocated" in issue.message
    assert issues(replace(HERE, hosts=2), {**TWO_NODES, "cluster.nodes": 1}) == []


@pytest.mark.parametrize(
    ("environment", "hosts"),
    [
        ({}, 1),
        ({"SLURM_NNODES": "2"}, 2),
        ({"SLURM_JOB_NUM_NODES": "3"}, 3),
        ({"SLURM_NNODES": "4", "SLURM_STEP_NUM_NODES": "1"}, 1),
        ({"PET_NNODES": "1:4"}, 4),
        ({"SLURM_NNODES": "many"}, 1),
        ({"GROUP_WORLD_SIZE": "0"}, 1),
    ],
)
def test_hosts_of_a_scheduler(environment: dict[str, str], hosts: int) -> None:
    assert hosts_in(environment) == hosts


def test_activations_count_against_memory() -> None:
    """The states of GPT-2 fit into 4 GiB, a micro batch of 16 with its activations does not."""
    large = {**GPT, "training.micro_batch_size": 16}
    plan = make_plan(load_job(None, large))
    (memory,) = plan.estimate.memory
    small = replace(HERE, memory_bytes=4 << 30)
    assert memory.state_bytes < small.memory_bytes < memory.allocated_bytes
    (issue,) = issues(small, large)
    assert issue.rule == "world-fits-memory" and "4.0 GiB are free" in issue.message
    assert "--recompute full" in issue.hint and "launch.check_memory=false" in issue.hint
    assert issues(small, {**large, "launch.check_memory": False}) == []
    between = {**large, "checkpoint.asynchronous": False}
    assert issues(replace(HERE, memory_bytes=memory.allocated_bytes), between) == []


def test_copies_for_checkpoints_count_against_memory() -> None:
    """Value and two moments in float32: in addition to the step on a CPU, alone on a host with
    GPUs; two replicas write one checkpoint."""
    pair = {**GPT, "parallel.dp": 2, "cluster.gpus_per_node": 2}
    plan = make_plan(load_job(None, pair))
    copies = plan.estimate.checkpoint_bytes
    step = 2 * plan.estimate.memory[0].allocated_bytes
    assert issues(replace(HERE, memory_bytes=step + copies), pair) == []
    (issue,) = issues(replace(HERE, memory_bytes=step + copies - 1), pair)
    assert issue.rule == "copies-fit-memory" and "checkpoint.asynchronous=false" in issue.hint
    assert issues(replace(HERE, memory_bytes=copies), {**pair, "cluster.nodes": 1}, "cuda") == []
    (issue,) = issues(replace(HERE, memory_bytes=copies - 1), pair, "cuda")
    assert issue.rule == "copies-fit-memory" and "peak of a step" not in issue.message


def test_offloaded_inputs_count_against_the_hosts_memory() -> None:
    offloaded = {
        **GPT,
        "training.recompute": "full",
        "training.offload_activations": True,
        "checkpoint.asynchronous": False,
        "launch.device": "cuda",
    }
    need = make_plan(load_job(None, offloaded)).estimate.host_bytes(1)
    assert need > 0
    assert issues(replace(HERE, gpus=1, memory_bytes=need), offloaded, "cuda") == []
    (issue,) = issues(replace(HERE, gpus=1, memory_bytes=need - 1), offloaded, "cuda")
    assert issue.rule == "copies-fit-memory"
    assert "offload_activations=false" in issue.hint and "checkpoint" not in issue.hint


def test_all_ranks_of_a_host_share_its_memory() -> None:
    pair = {**GPT, "parallel.pp": 2, "parallel.dp": 2, "cluster.gpus_per_node": 4}
    plan = make_plan(load_job(None, pair))
    need = 2 * sum(stage.allocated_bytes for stage in plan.estimate.memory)
    between = {**pair, "checkpoint.asynchronous": False}
    assert issues(replace(HERE, memory_bytes=need), between) == []
    (issue,) = issues(replace(HERE, memory_bytes=need - 1), pair)
    assert issue.message.startswith("4 ranks take")


def test_a_device_that_is_too_small_is_refused() -> None:
    large = {
        "model": "gpt2-xl",
        "cluster.device": "v100-16gb",
        "training.micro_batch_size": 8,
        "cluster.gpus_per_node": 1,
    }
    job = load_job(None, large)
    assert chosen_device(job, HERE) == "cuda"
    (issue,) = issues(replace(HERE, memory_bytes=1 << 36), large, "cuda")
    assert issue.rule == "world-fits-memory" and "V100" in issue.message
    assert issues(HERE, {**large, "launch.check_memory": False}, "cuda") == []


def test_a_host_that_hides_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(*_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")

    monkeypatch.setattr(machine_module.psutil, "virtual_memory", hidden)
    assert this_machine().memory_bytes > 1 << 20


def test_free_memory_is_what_can_be_taken(tmp_path: Path) -> None:
    assert this_machine().memory_bytes <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("settings", "device"),
    [
        ({}, None),
        ({"launch.device": "cpu", "cluster.device": "h100-sxm"}, "cpu"),
        ({"cluster.device": "h100-sxm"}, "cuda"),
        ({"cluster.device": "mi300x"}, "cuda"),  # torch's ROCm builds answer to cuda
    ],
)
def test_the_device_is_torchs(settings: dict[str, str], device: str | None) -> None:
    assert named_device(load_job(None, settings)) == device


def test_other_accelerators_are_refused() -> None:
    job = load_job(None, {"cluster.device": "h100-sxm", "cluster.device.kind": "tpu"})
    with pytest.raises(InputError, match="cpu, cuda or rocm"):
        named_device(job)


def test_a_launch_on_amds_gpus_warns_that_none_is_known() -> None:
    def words(device: str) -> str:
        job = load_job(None, {"cluster.device": device})
        return " ".join(launch_warnings(job, Machine(8, 8, 1 << 40)))

    assert "no run of mpctl" in words("mi300x") and "no run of mpctl" not in words("h100-sxm")


def test_gpus_without_a_driver_are_reported_if_the_device_is_open() -> None:
    def words(**settings: str) -> str:
        job = load_job(None, {key.replace("__", "."): value for key, value in settings.items()})
        return " ".join(launch_warnings(job, Machine(8, 0, 1 << 40, idle_gpus=2)))

    assert "2 GPUs on the PCI bus of this host" in words()
    assert "PCI bus" not in words(launch__device="cpu")


def test_one_machine_under_two_names_is_found() -> None:
    here = host_facts()
    other = replace(here, name="n2", boot="n2 5f0e")
    alias = replace(here, name="10.0.0.1")
    assert doubled_hosts([here, other]) == []
    (issue,) = doubled_hosts([replace(here, name="n1"), other, alias])
    assert (issue.rule, issue.where) == ("host-doubled", "n1, 10.0.0.1")
    assert here.name in issue.message
    assert "2 nodes" in issue.message


def test_hosts_without_a_boot_id_are_not_taken_for_one_machine() -> None:
    unknown = replace(host_facts(), boot="")
    assert doubled_hosts([unknown, unknown]) == []
