"""What records and reports say of many steps: seconds in collectives, FLOP over the seconds of a
step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.flops import model_and_hardware_flops
from mpctl.spec.load import load_job
from mpctl.train.kernels.backend import TORCH_BACKEND
from mpctl.train.kernels.partial_attention import kernel_name
from mpctl.train.runtime.report import REPORTED_STEPS, CommunicationSeconds, DeviceFigures, attention_kernels
from tests.train.runtime.test_axes import SHAPES
from tests.train.runtime.tiny import make_trainer, settings, tiny_job, train


def record(step: int, seconds: float, **communication: float) -> Any:
    more = {"communication_seconds": communication} if communication else {}
    return {"step": step, "loss": 1.0, "tokens": 1, "step_seconds": seconds, "tokens_per_second": 1.0, **more}


def reported(*records: Any) -> dict[str, Any]:
    communication, report = CommunicationSeconds(), {}
    for one in records:
        communication.add(one)
    communication.report(report)  # type: ignore[arg-type]
    return report


def test_the_first_steps_count_only_until_there_are_others() -> None:
    steps = [record(1, 10, tp=9), record(2, 5, tp=1), record(3, 5, tp=2), record(4, 5, tp=3)]
    assert reported(*steps) == {"communication_seconds": {"tp": 2.5}, "communication_share": 0.5}
    assert reported(steps[0])["communication_share"] == 0.9
    assert reported() == {}


def test_an_axis_that_a_step_did_not_use_took_nothing_of_it() -> None:
    steps = [record(n, 4, **axes) for n, axes in enumerate([{"tp": 9}] * 2 + [{"tp": 1}, {"pp": 2}])]
    assert reported(*steps) == {"communication_seconds": {"pp": 1.0, "tp": 0.5}, "communication_share": 0.375}
    assert reported(record(1, 2.0)) == {"communication_seconds": {}, "communication_share": 0.0}


def test_of_a_long_attempt_the_last_steps_are_reported() -> None:
    early = [record(n, 1.0, tp=1.0) for n in range(REPORTED_STEPS)]
    late = [record(n, 1.0, tp=0.25) for n in range(REPORTED_STEPS)]
    assert reported(*early, *late)["communication_seconds"] == {"tp": 0.25}


@pytest.mark.parametrize(("tp", "pp", "axes"), [(1, 1, []), (1, 2, ["pp", "world"])], ids=["one", "two"])
def test_every_step_has_its_seconds_by_axis(data: Path, tmp_path: Path, tp: int, pp: int, axes: list[str]) -> None:
    """No second is counted twice: together they are less than the step."""
    job = tiny_job(
        data,
        tp,
        parallel__pp=pp,
        cluster__gpus_per_node=tp * pp,
        training__steps=2,
        training__eval_samples=0,
        checkpoint__interval=0,
        checkpoint__at_end=False,
    )
    for rank in train(job, tmp_path):
        sent = {key.split()[0] for key in rank["traffic"]}
        for step in rank["records"]:
            seconds = step["communication_seconds"]
            assert list(seconds) == axes and set(seconds) == sent
            assert 0 <= sum(seconds.values()) < step["step_seconds"]
            assert all(value > 0 for value in seconds.values())


def test_a_record_has_the_utilization_of_its_device(data: Path, tmp_path: Path) -> None:
    job = tiny_job(data, training__recompute="full", cluster__device="cpu", training__dtype="fp32")
    trainer = make_trainer(job, tmp_path)
    figures = DeviceFigures.of(trainer)
    record: Any = {"step_seconds": 2.0}
    figures.add(record)
    model, hardware = model_and_hardware_flops(trainer.partition.layout)
    peak = job.cluster.device.peak_flops["fp32"]
    assert record["mfu"] == pytest.approx(model / 2.0 / peak)
    assert record["hfu"] == pytest.approx(hardware / 2.0 / peak) and hardware > 1.2 * model
    assert "reserved_memory_bytes" not in record  # a CPU has no such allocator


def test_what_the_allocator_took_is_recorded_and_reported(data: Path, tmp_path: Path) -> None:
    figures = DeviceFigures.of(make_trainer(tiny_job(data), tmp_path))
    on_gpu = replace(figures, name="NVIDIA H200", reserved_memory=lambda: 7)
    record, report = {"step_seconds": 1.0}, {}
    on_gpu.add(record)
    on_gpu.report(report)
    assert record["reserved_memory_bytes"] == 7
    assert (report["device"], report["reserved_memory_bytes"]) == ("NVIDIA H200", 7)


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_a_rank_names_what_computes_its_attentions(shape: str) -> None:
    cpu = torch.device("cpu")

    def named(**more: Any) -> list[str]:
        layout = JobLayout.of(load_job(None, settings(**{**SHAPES[shape], **more})))
        return attention_kernels(layout, TORCH_BACKEND, cpu)

    none = {"training__dropout": 0.0, "training__attention_dropout": 0.0}
    assert named(**none) == ["torch's kernel for CPUs"]
    assert named(**none | {"training__attention_dropout": 0.1}) == [kernel_name(0, cpu)]


def test_kernels_of_gpus_have_names() -> None:
    cuda = torch.device("cuda")
    assert [kernel_name(n, cuda) for n in (0, 1, 3)] == [
        "step by step, with scores in memory",
        "FlashAttention-2",
        "cuDNN's kernel",
    ]
