"""What ranks of a job run on, by torch's names."""

from __future__ import annotations

import pytest

from mpctl.errors import InputError
from mpctl.launch.node.device import named_device
from mpctl.launch.node.machine import Machine
from mpctl.launch.preflight import launch_warnings
from mpctl.spec.load import load_job


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


def test_a_launch_on_amds_gpus_is_told_that_none_is_known() -> None:
    def words(device: str) -> str:
        job = load_job(None, {"cluster.device": device})
        return " ".join(launch_warnings(job, Machine(8, 8, 1 << 40)))

    assert "no run of mpctl" in words("mi300x") and "no run of mpctl" not in words("h100-sxm")


def test_gpus_without_a_driver_are_told_where_the_device_is_open() -> None:
    def words(**settings: str) -> str:
        job = load_job(None, {key.replace("__", "."): value for key, value in settings.items()})
        return " ".join(launch_warnings(job, Machine(8, 0, 1 << 40, idle_gpus=2)))

    assert "2 GPUs on the PCI bus of this host" in words()
    assert "PCI bus" not in words(launch__device="cpu")
