"""The device of a rank: precision of products, place on the bus, what the allocator has held."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mpctl.runtime.device import (
    DeviceMemory,
    device_name,
    matmul_precision,
    pci_address,
    prepare_device,
)
from mpctl.runtime.optimizer import TORCH_DTYPES
from mpctl.spec.load import load_job


@pytest.mark.parametrize(("dtype", "word"), [("fp32", "highest"), ("tf32", "high")])
def test_only_tf32_rounds_the_operands_of_float32(dtype: str, word: str) -> None:
    job = load_job(None, {"training.dtype": dtype})
    assert matmul_precision(job) == word
    assert TORCH_DTYPES[dtype] == torch.float32


def test_a_cpu_is_left_as_it_is() -> None:
    before = torch.get_float32_matmul_precision()
    job = load_job(None, {"training.dtype": "tf32", "launch.device": "cpu"})
    assert prepare_device(job, 0) == torch.device("cpu")
    assert torch.get_float32_matmul_precision() == before
    memory = DeviceMemory(torch.device("cpu"))
    assert memory.peak() > 1 << 20 and memory.peak_reserved() is None
    assert device_name(torch.device("cpu")) is None


def test_the_address_of_a_gpu() -> None:
    """Numbers of torch's device properties, as lspci -D writes them."""
    gpu = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x9A, pci_device_id=0)
    assert pci_address(gpu) == "0001:9a:00.0"
    assert pci_address(SimpleNamespace(pci_bus_id=3)) == ""
