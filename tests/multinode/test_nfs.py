"""Two launches of one run directory over NFS, where a directory is locked on each host alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multinode.needs import program
from tests.multinode.nfs import NO_NFS

pytestmark = [pytest.mark.cluster("nfs"), pytest.mark.cluster("netns")]
SECONDS = 120.0


def test_the_second_launch_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    unshare = program("unshare") or "unshare"
    command = [unshare, "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "tests.multinode.nfs", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode == NO_NFS:
        pytest.skip(f"nfs: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["directory"] == 2  # why a file is locked
    refused = result["while it lives"]
    assert refused["refused"] == "run-dir-busy"
    assert f"process {result['holder']} on " in refused["message"] and refused["seconds"] < 5.0
    (warning,) = result["after it was killed"]["warnings"]
    assert f"was killed: process {result['holder']} on " in warning
    assert result["once more"]["warnings"] == []
    # A client keeps a removed file that is still open under a name of its own.
    assert [name for name in result["left"] if not name.startswith(".nfs")] == [".mpctl-run"]
