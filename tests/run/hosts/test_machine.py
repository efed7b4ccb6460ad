"""GPUs by the files of their drivers, in trees of files as hosts and containers have them.

Control groups of both versions, as files in a folder.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mpctl.run.doctor.probe import probe_gpus
from mpctl.run.hosts.machine import (
    amd_devices,
    count_visible,
    gpus_on_bus,
    memory_headroom,
    memory_kills,
    nvidia_devices,
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def amd_node(number: int, minor: int, location: int, version: int = 90402) -> dict[str, str]:
    facts = f"simd_count 1216\ngfx_target_version {version}\ndomain 0\nlocation_id {location}\n"
    node = f"sys/class/kfd/kfd/topology/nodes/{number}/properties"
    return {node: f"{facts}drm_render_minor {minor}\nname_that_is no number\n"}


def test_device_files_count_before_the_drivers_folder(tmp_path: Path) -> None:
    """A container with two GPUs of an 8-GPU host."""
    host = {f"proc/driver/nvidia/gpus/0000:0{n}:00.0/information": "" for n in range(8)}
    root = write(tmp_path, host)
    assert nvidia_devices(root) == 8  # the driver has made no device file yet
    write(root, {f"dev/{name}": "" for name in ("nvidia2", "nvidia5", "nvidiactl", "nvidia-uvm")})
    assert nvidia_devices(root) == 2


def test_amd_gpus_are_those_with_a_render_file(tmp_path: Path) -> None:
    """A host of two MI300X (gfx942) and one MI250X (gfx90a), which this container may not use."""
    bus = "sys/bus/pci/devices/0000:85:00.0/mem_info_vram"
    root = write(
        tmp_path,
        {
            "sys/class/kfd/kfd/topology/nodes/0/properties": "simd_count 0\ncpu_cores_count 64\n",
            **amd_node(1, 128, 0x0500),
            **amd_node(10, 136, 0x8500),
            **amd_node(2, 129, 0x2600, 90010),
            "dev/dri/renderD128": "",
            "dev/dri/renderD136": "",
            f"{bus}_total": "206141652992\n",
            f"{bus}_used": "1048576\n",
        },
    )
    assert amd_devices(root) == []  # without /dev/kfd nothing can be computed
    write(root, {"dev/kfd": ""})
    first, second = amd_devices(root)
    assert (first.name, first.address, first.memory_total) == ("gfx942", "0000:05:00.0", 0)
    assert (second.address, second.memory_total) == ("0000:85:00.0", 206141652992)
    assert second.memory_used == 1 << 20


def test_gpus_on_the_bus_need_no_driver(tmp_path: Path) -> None:
    def device(address: str, vendor: str, kind: str) -> dict[str, str]:
        folder = f"sys/bus/pci/devices/{address}"
        return {f"{folder}/vendor": f"{vendor}\n", f"{folder}/class": f"{kind}\n"}

    root = write(
        tmp_path,
        {
            **device("0000:17:00.0", "0x10de", "0x030200"),  # an H100
            **device("0000:18:00.0", "0x10de", "0x068000"),  # an NVSwitch
            **device("0000:05:00.0", "0x1002", "0x120000"),  # an MI300X
            **device("0000:06:00.0", "0x1002", "0x030000"),  # graphics of a processor
            **device("0000:00:1f.0", "0x8086", "0x030000"),
        },
    )
    assert gpus_on_bus(root) == {"NVIDIA": 1, "AMD": 1}
    assert gpus_on_bus(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("vendor", "environment", "count"),
    [
        ("NVIDIA", {}, 8),
        ("NVIDIA", {"CUDA_VISIBLE_DEVICES": ""}, 0),
        ("NVIDIA", {"CUDA_VISIBLE_DEVICES": "2, 3"}, 2),
        ("NVIDIA", {"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ("NVIDIA", {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(16)))}, 8),
        ("NVIDIA", {"HIP_VISIBLE_DEVICES": "0"}, 8),
        ("AMD", {"ROCR_VISIBLE_DEVICES": "0,1,2,3", "HIP_VISIBLE_DEVICES": "1"}, 1),
        ("AMD", {"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
    ],
)
def test_variables_hide_gpus(vendor: str, environment: dict[str, str], count: int) -> None:
    assert count_visible(8, vendor, environment) == count


def test_the_doctor_describes_amd_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    root = write(
        tmp_path,
        {**amd_node(1, 128, 0x0500), "dev/kfd": "", "dev/dri/renderD128": "", "sys/module/amdgpu/version": "6.10.5\n"},
    )
    gpus = probe_gpus(root)
    (gpu,) = gpus.devices
    assert (gpus.tool, gpus.device_files) == ("amdgpu", 1)
    assert (gpu.name, gpu.driver, gpu.index) == ("AMD gfx942", "6.10.5", 0)
    assert probe_gpus(write(tmp_path / "n", {"dev/nvidia0": ""})).tool == "device files"


VERSION_2 = {
    "job/step/memory.max": "1000",
    "job/step/memory.current": "700",
    "job/step/memory.stat": "anon 500\ninactive_file 100\n",
    "job/step/memory.events": "low 0\noom 1\noom_kill 3\n",
    "job/memory.max": "max",
    "job/memory.current": "800",
}
VERSION_1 = {
    "memory/job/step/memory.limit_in_bytes": "9223372036854771712",
    "memory/job/step/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    "memory/job/memory.limit_in_bytes": "500",
    "memory/job/memory.usage_in_bytes": "200",
    "memory/job/memory.stat": "inactive_file 7\ntotal_inactive_file 100\n",
}


@pytest.mark.parametrize(
    ("files", "own", "kills"),
    [
        (VERSION_2, "0::/job/step\n", 3),
        (VERSION_1, "9:cpu,cpuacct:/other\n4:memory:/job/step\n0::/\n", 3),
        ({}, "0::/job/step\n", 0),
        ({}, "", 0),
    ],
)
def test_control_groups(tmp_path: Path, files: dict[str, str], own: str, kills: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "self").write_text(own)
    assert memory_kills(tmp_path, tmp_path / "self") == kills
    assert memory_headroom(tmp_path, tmp_path / "self") == (400 if files else None)
    assert memory_kills(tmp_path, tmp_path / "absent") == 0
