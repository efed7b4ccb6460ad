"""What a step's record says of the device: counted FLOP over the seconds of the step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpctl.estimate.flops import model_and_hardware_flops
from mpctl.runtime.device_figures import DeviceFigures
from tests.runtime.tiny import make_data, make_trainer, tiny_job


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


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
    assert report == {"device": "NVIDIA H200", "reserved_memory_bytes": 7}
