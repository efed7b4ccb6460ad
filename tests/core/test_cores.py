"""The cores that a process may keep busy: of its affinity, within the quotas of its groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpctl.core.cores import core_count, cpu_quota, usable_cores, within_quota

NESTED = {"pod/box/cpu.max": "600000 100000\n", "pod/cpu.max": "350000 100000\n", "cpu.max": "max 100000\n"}
VERSION_1 = {
    "cpu/pod/box/cpu.cfs_quota_us": "-1\n",
    "cpu/pod/box/cpu.cfs_period_us": "100000\n",
    "cpu/pod/cpu.cfs_quota_us": "150000\n",
    "cpu/pod/cpu.cfs_period_us": "100000\n",
}
HYBRID = "5:memory:/other\n3:cpu,cpuacct:/pod/box\n0::/pod\n"


def quota(root: Path, files: dict[str, str], own: str) -> float | None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "self").write_text(own)
    return cpu_quota(root, root / "self")


@pytest.mark.parametrize(
    ("files", "own", "granted"),
    [
        (NESTED, "0::/pod/box\n", 3.5),  # the group above grants less
        (NESTED, "0::/pod\n", 3.5),
        (NESTED, "0::/\n", None),
        ({**NESTED, "pod/cpu.max": "max 100000"}, "0::/pod/box\n", 6.0),
        ({"cpu.max": "50000 100000"}, "0::/seen/from/the/host\n", 0.5),  # a container's own mount
        (VERSION_1, HYBRID, 1.5),
        ({**VERSION_1, "pod/cpu.max": "125000 100000"}, HYBRID, 1.25),
        ({"cpu.max": "garbage"}, "0::/\n", None),
        ({"cpu.max": "100000 0"}, "0::/\n", None),
        ({}, "0::/pod/box\n", None),
        ({}, "", None),
    ],
)
def test_the_least_quota_of_nested_groups(
    tmp_path: Path, files: dict[str, str], own: str, granted: float | None
) -> None:
    assert quota(tmp_path, files, own) == granted


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (3.5, 3), (3.0, 3), (0.5, 1), (16.0, 8), (1.99, 1)])
def test_whole_processors_and_at_least_one(quota: float | None, cores: int) -> None:
    assert within_quota(8, quota) == cores


def test_this_process_has_a_core() -> None:
    assert 1 <= core_count() <= len(usable_cores())
