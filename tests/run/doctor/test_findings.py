"""Reports of synthetic hosts, and the findings about them."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.run.doctor.documents import CollectiveReport, Finding, HostReport, InfiniBandPort, PairResult, ProbeFailure
from mpctl.run.doctor.findings import find_problems
from mpctl.run.doctor.job import Needs
from tests.run.doctor.synthetic import GIB, gpu, gpu_host, host, pair

ON_CPU = Needs(device="cpu", ranks=4)
ON_GPUS = Needs(device="cuda", ranks=8)


def findings(*hosts: HostReport, needs: Needs = ON_CPU, **more: Any) -> dict[str, Finding]:
    """By rule; each rule once."""
    found = find_problems(hosts, needs, **more)
    assert len({finding.rule for finding in found}) == len(found)
    return {finding.rule: finding for finding in found}


def test_healthy_hosts_have_no_findings() -> None:
    assert findings(host()) == {}
    assert findings(host("n1"), host("n2"), pairs=[pair(0, 1)], skew=[0.0, 0.0]) == {}
    assert findings(gpu_host(), needs=ON_GPUS) == {}


ERRORS: dict[str, HostReport] = {
    "torch-missing": host(software={"torch": None}),
    "torch-old": host(software={"torch": "2.3.1+cu121"}),
    "torch-unusable": host(torch=None, failures=[ProbeFailure(probe="torch", error="libcudart")]),
    "host-silent": host(failures=[ProbeFailure(probe="host", error="no answer within 150 s")]),
    "gloo-missing": host(torch={"has_gloo": False}),
    "gloo-fails": host(torch={"gloo_error": "unable to find interface"}),
    "loopback-down": host(network={"loopback_error": "cannot listen at 127.0.0.1"}),
    "few-ports": host(network={"first_port": 40_000, "last_port": 40_010}),
    "interface-missing": host(network={"gloo_setting": "ib0"}),
    "run-dir-unwritable": host(folder={"write_error": "Read-only file system"}),
    "run-dir-without-locks": host(folder={"lock_error": "Function not implemented"}),
    "run-dir-without-mmap": host(folder={"map_error": "No such device"}),
    "run-dir-unusable": host(folder=None, failures=[ProbeFailure(probe="folder", error="no answer within 20 s")]),
}


@pytest.mark.parametrize("rule", ERRORS)
def test_what_would_break_a_launch_is_an_error_with_a_way_out(rule: str) -> None:
    finding = findings(ERRORS[rule])[rule]
    assert finding.status == "error"
    assert finding.hosts == ["n1"]
    assert finding.hint


WARNINGS: dict[str, HostReport] = {
    "not-utf8": host(software={"encoding": "ascii"}),
    "slow-setting": host(software={"environment": {"CUDA_LAUNCH_BLOCKING": "1"}}),
    "cpu-quota": host(processor={"quota": 1.5}),
    "host-busy": host(processor={"load": 60.0}),
    "memory-low": host(memory={"group_free": 100 << 20}),
    "memory-swapped": host(memory={"swap_used": 100 * GIB}),
    "few-open-files": host(limits={"open_files": 1024}),
    "few-processes": host(limits={"group_processes": 500}),
    "disk-low": host(folder={"free": 10 << 20}),
    "disk-slow": host(folder={"write_rate": 1e6}),
    "disk-slow-sync": host(folder={"sync_seconds": 0.5}),
    "disk-volatile": host(folder={"device": "tmpfs"}),
    "triton-missing": gpu_host(software={"triton": None}),
    "gpu-busy": gpu_host(gpus={"devices": [gpu(0, processes=1)]}),
    "gpu-memory-errors": gpu_host(gpus={"devices": [gpu(0, uncorrected_errors=3)]}),
    "gpu-mig": gpu_host(gpus={"devices": [gpu(0, mig=True)]}),
    "shm-small": gpu_host(memory={"shm_total": 64 << 20}),
    "gpu-driver-missing": host(gpus={"on_bus": 8}),
    "nvidia-smi-fails": host(gpus={"tool": "nvidia-smi", "error": "driver/library mismatch"}),
    "probe-failed": host(network=None, failures=[ProbeFailure(probe="network", error="no answer within 20 s")]),
}


@pytest.mark.parametrize("rule", WARNINGS)
def test_what_may_hurt_is_a_warning(rule: str) -> None:
    assert findings(WARNINGS[rule])[rule].status == "warning"


def test_memory_low_names_the_limit_that_is_short() -> None:
    assert "container" in findings(host(memory={"group_free": 1 << 20}))["memory-low"].hint
    assert "other processes" in findings(host(memory={"available": 1 << 20}))["memory-low"].hint


@pytest.mark.parametrize(
    ("rule", "torch", "gpus"),
    [
        ("torch-without-cuda", {"cuda_built": None, "gpus": 0}, {}),
        ("cuda-unusable", {"gpus": 0, "cuda_error": "driver too old"}, {}),
        ("nccl-missing", {"has_nccl": False}, {}),
        ("nccl-fails", {"nccl_error": "unhandled system error"}, {}),
        ("gpus-hidden", {"gpus": 0}, {"visible": ""}),
        ("world-fits-machine", {"gpus": 4}, {}),
    ],
)
def test_gpus_that_cannot_be_used_break_a_job_on_gpus_only(
    rule: str, torch: dict[str, Any], gpus: dict[str, Any]
) -> None:
    report = gpu_host(torch=torch, gpus=gpus)
    assert findings(report, needs=ON_GPUS)[rule].status == "error"
    on_cpu = findings(report, needs=ON_CPU)
    assert rule not in on_cpu or on_cpu[rule].status == "warning"


def test_a_job_needs_files_and_processes() -> None:
    needs = Needs(device="cpu", ranks=512)
    lacking = findings(host(limits={"open_files": 1100, "processes": 9000}), needs=needs)
    errors = {rule for rule, finding in lacking.items() if finding.status == "error"}
    assert errors == {"open-files-short", "processes-short"}


def test_a_launcher_of_many_hosts_needs_a_file_for_each() -> None:
    limits = {"open_files": 100_000, "open_files_hard": 1024}
    many = findings(host(limits=limits), needs=Needs(device="cpu", nodes=1000))
    message = "1,024 open files a process at most, a launcher of 1,000 hosts may need 2,128"
    assert many["launcher-files-short"].message == message
    few = findings(host(limits=limits), needs=Needs(device="cpu", nodes=250))
    assert "launcher-files-short" not in few


def test_a_gpu_must_have_the_memory_of_a_rank_free() -> None:
    devices = [gpu(0), gpu(1, memory_used=50 * GIB)]
    needs = Needs(device="cuda", ranks=2, gpu_bytes=40 * GIB)
    finding = findings(gpu_host(count=2, gpus={"devices": devices}), needs=needs)["gpu-memory-short"]
    assert finding.message == "a rank takes 40.0 GiB, GPU 1 has 30.0 GiB free"


def test_tp_over_slow_links_is_a_warning() -> None:
    slow = gpu_host(link="SYS")
    with_tp = findings(slow, needs=Needs(device="cuda", ranks=8, spans_tp=True))
    assert "between NUMA nodes" in with_tp["gpu-links-slow"].message
    assert "gpu-links-slow" not in findings(slow, needs=ON_GPUS)


def test_threads_that_exceed_the_cores_are_a_warning() -> None:
    needs = Needs(device="cpu", ranks=8, threads=16)
    message = findings(host(), needs=needs)["threads-exceed-cores"].message
    assert message == "8 ranks of 16 threads share 64 processors"
    fits, granted = Needs(device="cpu", ranks=4, threads=2), host(processor={"quota": 6.5})
    message = findings(granted, needs=fits)["threads-exceed-cores"].message
    assert message == "4 ranks of 2 threads share 6 processors"


# ---------------------------------------------------------------- several hosts


def test_the_same_finding_about_several_hosts_is_one() -> None:
    found = findings(*(host(f"n{i}", processor={"quota": 2.0}) for i in range(3)))
    assert found["cpu-quota"].hosts == ["n0", "n1", "n2"]


def test_too_few_hosts_is_an_error() -> None:
    found = findings(host(), needs=Needs(device="cpu", nodes=2))
    assert found["hosts-too-few"].message == "the job needs 2 hosts, 1 are there"


@pytest.mark.parametrize(
    ("rule", "status", "change"),
    [
        ("mpctl-differs", "error", {"software": {"mpctl": "0.1.0"}}),
        ("torch-differs", "error", {"software": {"torch": "2.12.1"}}),
        ("nccl-differs", "error", {"torch": {"nccl": "2.20.5"}}),
        ("python-differs", "warning", {"software": {"python": "3.11.9"}}),
        ("architecture-differs", "warning", {"software": {"architecture": "aarch64"}}),
        ("processors-differ", "warning", {"processor": {"cores": 32}}),
        ("gpus-differ", "warning", {"gpus": {"devices": [gpu(0)]}}),
        ("driver-differs", "warning", {"gpus": {"devices": [gpu(0, driver="535.1")] * 8}}),
        ("settings-differ", "warning", {"software": {"environment": {"NCCL_ALGO": "Ring"}}}),
    ],
)
def test_hosts_that_differ_are_named(rule: str, status: str, change: dict[str, Any]) -> None:
    finding = findings(gpu_host("n1"), gpu_host("n2", **change), gpu_host("n3"))[rule]
    assert finding.status == status
    assert finding.hosts == ["n2"]
    assert "n1, n3" in finding.message
    assert finding.hint


def test_a_patch_level_of_python_may_differ() -> None:
    assert findings(host("n1"), host("n2", software={"python": "3.12.9"})) == {}


def test_a_run_directory_that_is_not_shared_is_an_error_on_several_hosts_only() -> None:
    alone = host("n1", folder={"is_shared": False})
    assert findings(alone) == {}
    assert findings(host("n0"), alone)["run-dir-not-shared"].hosts == ["n1"]


def test_a_clock_that_is_off_is_a_warning() -> None:
    finding = findings(host("n1"), host("n2"), skew=[0.0, -90.0])["clock-skew"]
    assert finding.hosts == ["n2"]
    assert finding.message.startswith("90.00 s behind the launcher's")
    assert "clock-skew" not in findings(host("n1"), host("n2"), skew=[0.4, -0.9])


def test_a_pair_that_cannot_connect_is_an_error_that_names_the_host_of_all_such_pairs() -> None:
    hosts = [host(f"n{i}") for i in range(4)]
    apart = [PairResult(first=i, second=3, error="timed out") for i in range(3)]
    good = [pair(0, 1), pair(0, 2), pair(1, 2)]
    finding = findings(*hosts, pairs=[*good, *apart])["pair-apart"]
    assert finding.status == "error"
    assert finding.hosts == ["n3"]
    assert "3 pairs of hosts cannot connect: n0 to n3 (timed out)" in finding.message


def test_slow_pairs_are_judged_by_the_median() -> None:
    hosts = [host(f"n{i}") for i in range(4)]
    pairs = [pair(a, b, rate=1e9 if 2 in (a, b) else 1e10) for a in range(4) for b in range(a)]
    three_fast_three_slow = findings(*hosts, pairs=pairs)
    assert three_fast_three_slow["pair-slow"].hosts == ["n2"]
    even = [pair(a, b, rate=1e9) for a in range(4) for b in range(a)]
    assert "pair-slow" not in findings(*hosts, pairs=even)


def test_late_pairs_are_named() -> None:
    hosts = [host(f"n{i}") for i in range(3)]
    pairs = [pair(0, 1), pair(0, 2), pair(1, 2, latency=2e-3)]
    finding = findings(*hosts, pairs=pairs)["pair-late"]
    assert "n1 to n2 2.0 ms" in finding.message


def test_a_pair_far_below_its_network_cards_is_named() -> None:
    """Also where there is one pair only, which has no median to be compared with."""
    slow = findings(host("n1"), host("n2"), pairs=[pair(0, 1, rate=2.5e7)])["pair-below-link"]
    assert slow.message == "n1 to n2 23.8 MiB/s over 100 Gbit/s"
    assert slow.hosts == ["n1", "n2"]
    unknown = host("n2", network={"towards": "lo"})  # an interface without a nominal rate
    alike = [pair(0, 1, rate=2.5e7)]
    assert "pair-below-link" not in findings(unknown, unknown, pairs=alike)


def test_an_all_reduce_that_fails_is_an_error() -> None:
    report = CollectiveReport(backend="nccl", hosts=2, world_size=2, errors={"1": "no route"})
    finding = findings(host(), collectives=[report])["collective-fails"]
    assert (finding.where, finding.message) == ("nccl", "rank 1 of 2: no route")


# ---------------------------------------------------------------- RDMA, errors first


def test_rdma_needs_locked_memory_and_active_ports() -> None:
    ports = [
        InfiniBandPort(device=f"mlx5_{i}", port=1, state=state, rate="400", layer="InfiniBand")
        for i, state in enumerate(["ACTIVE", "DOWN"])
    ]
    found = findings(host(network={"infiniband": ports}, limits={"locked_memory": 64 << 10}))
    assert found["rdma-port-down"].message == "RDMA ports not active: mlx5_1:1 DOWN"
    assert found["locked-memory"].hint.startswith("ulimit -l unlimited")


def test_errors_come_first() -> None:
    ill = host(processor={"load": 60.0}, software={"torch": None})
    assert [finding.status for finding in find_problems([ill], ON_CPU)] == ["error", "warning"]
