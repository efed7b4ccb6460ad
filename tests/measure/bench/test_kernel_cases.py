"""Which kernels are timed on which ranks, and which jobs are refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.measure.bench.kernel_cases import (
    MEMORY_SHARE,
    STREAM_BYTES,
    THIS_MACHINE,
    kernel_cases,
    parse_dtypes,
    parse_ranks,
)
from mpctl.run.hosts.machine import Machine
from mpctl.spec.load import load_job

TWO_CORES = Machine(cores=2, gpus=0, memory_bytes=16 * 2**30)
TWO_GPUS = Machine(cores=8, gpus=2, memory_bytes=16 * 2**30)


def refusal(call: Any, *args: Any, **options: Any) -> InputError:
    with pytest.raises(InputError) as refused:
        call(*args, **options)
    error: InputError = refused.value
    return error


def test_ranks_are_one_and_all() -> None:
    assert parse_ranks(None, TWO_CORES, device="auto") == (1, 2)
    assert parse_ranks(None, TWO_GPUS, device="auto") == (1, 2)
    assert parse_ranks(None, TWO_GPUS, device="cpu") == (1, 8)
    assert parse_ranks(" 4, 1,4", TWO_CORES, device="cpu") == (1, 4)


def test_ranks_that_are_no_numbers() -> None:
    for text in ("", "0", "1,,2", "two", "-1", "1.5"):
        error = refusal(parse_ranks, text, TWO_CORES, device="cpu")
        assert [issue.rule for issue in error.issues] == ["bad-ranks"] and repr(text) in str(error)


def test_dtypes_are_those_of_torch() -> None:
    assert parse_dtypes("fp32, bf16,fp32") == ("fp32", "bf16")
    assert "'fp8'" in str(refusal(parse_dtypes, "fp32,fp8"))


def test_each_rank_has_one_thread_unless_the_job_says_more() -> None:
    cases = kernel_cases(load_job(None, THIS_MACHINE), TWO_CORES, ranks=(1, 2), device="cpu")
    assert cases.threads == 1 and cases.plan.job.world_size == 2
    assert cases.timings == 2 * len(cases.kernels)
    job = load_job(None, {**THIS_MACHINE, "launch.threads_per_rank": 2})
    assert kernel_cases(job, TWO_CORES, ranks=(1,), device="cpu").threads == 2


def test_a_cpu_without_a_cluster_is_estimated_as_this_machine() -> None:
    job = load_job(None, {"model": "demo-gpt"})
    cases = kernel_cases(job, TWO_CORES, ranks=(1,), device="cpu")
    assert cases.device is not None and cases.device.is_cpu
    assert all(kernel.predicted_seconds for kernel in cases.kernels)


def test_the_figures_of_another_device_are_left_out() -> None:
    """A job for H100s whose kernels run on a CPU: shapes are its own, estimates none."""
    job = load_job(None, {"model": "demo-gpt", "cluster": "dgx-h100", "parallel.tp": 8})
    cases = kernel_cases(job, TWO_CORES, ranks=(1,), device="cpu")
    assert cases.device is None and "H100" in cases.warnings[0]
    assert {kernel.predicted_seconds for kernel in cases.kernels} == {None}
    assert cases.kernels[0].case["shape"]["n"] == 3 * 256 // 8


def test_kernels_are_our_own_whatever_runtime_and_dtype_a_job_trains_in() -> None:
    """Estimates are of the kernels that run here; of fp8 there are none."""
    settings = {**THIS_MACHINE, "training.runtime": "megatron-core", "training.dtype": "bf16"}
    theirs = kernel_cases(load_job(None, settings), TWO_CORES, ranks=(1,), device="cpu")
    ours = {**THIS_MACHINE, "training.dtype": "bf16", "model.attention": "unfused"}
    own = kernel_cases(load_job(None, ours), TWO_CORES, ranks=(1,), device="cpu")
    assert theirs.kernels == own.kernels
    narrow = {"model": "demo-gpt", "cluster": "dgx-h100", "training.dtype": "fp8", "training.runtime": "megatron-core"}
    job = load_job(None, narrow)
    assert "'fp8'" in str(refusal(kernel_cases, job, TWO_CORES, ranks=(1,), device="cpu"))
    cases = kernel_cases(job, TWO_CORES, ranks=(1,), dtypes=("bf16",), device="cpu")
    assert {kernel.case["dtype"] for kernel in cases.kernels} == {"bf16"}


def test_a_dtype_without_a_rate_has_no_estimate() -> None:
    device = {
        "name": "a core",
        "kind": "cpu",
        "memory_bytes": 2**33,
        "memory_bandwidth": 1e10,
        "peak_flops": {"fp32": 1e11},
        "source": "made up",
    }
    job = load_job(None, {"model": "demo-gpt", "cluster.device": device})
    cases = kernel_cases(job, TWO_CORES, ranks=(1,), dtypes=("fp32", "bf16"), device="cpu")
    known = {k.case["dtype"]: k.predicted_seconds is not None for k in cases.kernels}
    assert known == {"fp32": True, "bf16": False}
    product = next(k for k in cases.kernels if k.case["dtype"] == "bf16")
    assert product.bytes == cases.kernels[0].bytes / 2


def test_arrays_of_the_streams_fit_the_memory() -> None:
    job = load_job(None, THIS_MACHINE)

    def elements(machine: Machine, ranks: int) -> int:
        kernels = kernel_cases(job, machine, ranks=(ranks,), device="cpu").kernels
        return next(k.case["shape"]["elements"] for k in kernels if k.case["kernel"] == "triad")

    assert 4 * elements(TWO_CORES, 2) == STREAM_BYTES
    small = Machine(cores=2, gpus=0, memory_bytes=2**30)
    assert 3 * 2 * 4 * elements(small, 2) <= MEMORY_SHARE * small.memory_bytes


def test_operands_that_do_not_fit_are_refused() -> None:
    job = load_job(None, {**THIS_MACHINE, "training.micro_batch_size": 4096})
    error = refusal(kernel_cases, job, TWO_CORES, ranks=(1, 2), device="cpu")
    assert [issue.rule for issue in error.issues] == ["kernels-memory"]
    assert "of this machine's free memory" in str(error)


def test_a_full_layer_that_does_not_fit_is_left_out() -> None:
    """Of GPT-3 on 8 tensor-parallel ranks the local shapes fit 16 GiB, the unsharded layer of 1.8 G
    parameters does not; a step of the optimizer is of 16 Mi parameters, as long for each."""
    cases = kernel_cases(load_job("gpt3-175b-1024"), TWO_CORES, ranks=(1, 2), device="cpu")
    sites = {k.site for k in cases.kernels if k.case["kernel"] == "layer"}
    assert sites == {"tiny"} and {k.site for k in cases.left_out} == {"layers"}
    assert any("layer layers both" in warning for warning in cases.warnings)
    step = next(k for k in cases.kernels if k.case["kernel"] == "optimizer")
    assert step.case["shape"] == {"elements": 2**24}


def test_a_job_without_a_model_or_a_legal_layout_is_refused() -> None:
    error = refusal(kernel_cases, load_job(None, {"parallel.tp": 2}), TWO_CORES, ranks=(1,))
    assert error.issues[0].rule == "no-model"
    job = load_job(None, {**THIS_MACHINE, "parallel.tp": 3, "cluster.gpus_per_node": 3})
    assert "heads" in str(refusal(kernel_cases, job, TWO_CORES, ranks=(1,), device="cpu"))
