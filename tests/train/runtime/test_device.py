"""A rank's device: its precision, its place on the bus and the cores beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mpctl.core.cores import usable_cores
from mpctl.spec.load import load_job
from mpctl.train.runtime.device import (
    DeviceMemory,
    bind_to_node,
    cores_text,
    device_name,
    gpu_node,
    matmul_precision,
    node_cores,
    pci_address,
    prepare_device,
)
from mpctl.train.runtime.optimizer import TORCH_DTYPES


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


GPU = "0000:17:00.0"


def host(root: Path, *, node: str, cores: dict[int, str]) -> Path:
    gpu = root / "sys/bus/pci/devices" / GPU
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text(f"{node}\n")
    for number, text in cores.items():
        folder = root / "sys/devices/system/node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{text}\n")
    return root


def test_the_node_and_its_cores(tmp_path: Path) -> None:
    root = host(tmp_path, node="1", cores={0: "0-3,8-11", 1: "4-7,12-15"})
    assert gpu_node(GPU, root) == 1 and gpu_node("0000:ff:00.0", root) is None
    assert node_cores(1, root) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert node_cores(7, root) is None


@pytest.mark.parametrize(("node", "cores"), [("-1", {0: "0", 1: "1"}), ("0", {0: "0-15"})])
def test_nothing_to_choose(tmp_path: Path, node: str, cores: dict[int, str]) -> None:
    root = host(tmp_path, node=node, cores=cores)
    assert gpu_node(GPU, root) is None and bind_to_node(GPU, root) == ""


def test_a_node_without_memory_of_cores_binds_nothing(tmp_path: Path) -> None:
    root = host(tmp_path, node="1", cores={0: "0-63", 1: ""})  # a node of memory alone
    assert node_cores(1, root) is None and bind_to_node(GPU, root) == ""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
def test_all_threads_are_bound_to_the_cores_that_may_be_used(tmp_path: Path) -> None:
    """In a process of its own: this one's threads and later ones keep their cores."""
    mine = usable_cores()
    if len(mine) < 2:
        pytest.skip("needs two cores")
    root = host(tmp_path, node="1", cores={0: cores_text(mine[:-1]), 1: f"{mine[-1]},4000"})
    program = f"""
import os, sys, threading
from pathlib import Path
from mpctl.train.runtime.device import bind_to_node

early, end = [], threading.Event()
thread = threading.Thread(target=lambda: (end.wait(), early.append(os.sched_getaffinity(0))))
thread.start()
print(bind_to_node({GPU!r}, Path(sys.argv[1])))
end.set()
thread.join()
print(early[0] == os.sched_getaffinity(0), os.sched_getaffinity(0))
"""
    done = subprocess.run([sys.executable, "-c", program, str(root)], capture_output=True, text=True, check=True)
    said, cores = done.stdout.splitlines()
    assert said == f"bound to the cores {mine[-1]} of NUMA node 1, beside GPU {GPU}"
    assert cores == f"True {{{mine[-1]}}}"


def test_a_node_of_which_no_core_may_be_used_is_left(tmp_path: Path) -> None:
    before = usable_cores()
    root = host(tmp_path, node="1", cores={0: "0-3", 1: "4000-4003"})
    assert "not bound to NUMA node 1" in bind_to_node(GPU, root)
    assert usable_cores() == before
