"""Control groups of both versions, as files in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpctl.launch.node.cgroup import memory_headroom, memory_kills

VERSION_2 = {"job/step/memory.max": "1000", "job/step/memory.current": "700",
             "job/step/memory.stat": "anon 500\ninactive_file 100\n",
             "job/step/memory.events": "low 0\noom 1\noom_kill 3\n",
             "job/memory.max": "max", "job/memory.current": "800"}  # fmt: skip
VERSION_1 = {"memory/job/step/memory.limit_in_bytes": "9223372036854771712",
             "memory/job/step/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
             "memory/job/memory.limit_in_bytes": "500", "memory/job/memory.usage_in_bytes": "200",
             "memory/job/memory.stat": "inactive_file 7\ntotal_inactive_file 100\n"}  # fmt: skip


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
