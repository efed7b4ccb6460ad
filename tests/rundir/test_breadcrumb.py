"""A rank's breadcrumb outlives the rank; a reader takes whatever there is."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from pathlib import Path

from mpctl.rundir.breadcrumb import (
    FILE_BYTES,
    JOINED,
    STARTED,
    TEXT_BYTES,
    Breadcrumb,
    BreadcrumbState,
    read_breadcrumb,
)
from mpctl.rundir.collective_log import GroupProgress

KILLED = """
import os, signal, sys
from pathlib import Path
from mpctl.rundir.breadcrumb import JOINED, Breadcrumb
crumb = Breadcrumb(Path(sys.argv[1]))
crumb.reach(JOINED, "joined")
crumb.write("step 7, forward of micro batch 2")
crumb.beat()
tp = crumb.collectives.group("tp", (2, 3))
tp.wait(tp.start(1, 4096))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_rank_wrote_is_read(tmp_path: Path) -> None:
    path = tmp_path / "doing" / "rank-3"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)])
    assert ended.returncode == -9
    state = read_breadcrumb(path)
    assert (state.doing, state.start, state.beats) == (
        "step 7, forward of micro batch 2",
        JOINED,
        1,
    )
    assert state.collectives.waits_in == GroupProgress("tp", "2-3", 1, 0, "all_reduce", 4096)


def test_a_long_text_is_cut_and_a_short_one_replaces_it(tmp_path: Path) -> None:
    crumb = Breadcrumb(tmp_path / "rank-0")
    crumb.write("é" * TEXT_BYTES)
    assert read_breadcrumb(crumb.path).doing == "é" * (TEXT_BYTES // 2)
    crumb.write("saving")
    assert read_breadcrumb(crumb.path) == BreadcrumbState("saving", STARTED, 0)
    assert crumb.path.stat().st_size == FILE_BYTES


def test_no_file_and_half_a_file_are_states_too(tmp_path: Path) -> None:
    path = tmp_path / "rank-0"
    assert read_breadcrumb(path) == BreadcrumbState()
    path.write_bytes(b"starting\xff")
    assert read_breadcrumb(path) == BreadcrumbState("starting\N{REPLACEMENT CHARACTER}")


def test_beat_and_text_have_their_times(tmp_path: Path) -> None:
    began = time.time()
    crumb = Breadcrumb(tmp_path / "rank-0")
    assert read_breadcrumb(crumb.path).beat_time == 0
    crumb.beat()
    state = read_breadcrumb(crumb.path)
    assert began <= state.text_time <= state.beat_time <= time.time()


def test_a_file_of_an_older_version_has_no_times(tmp_path: Path) -> None:
    path = tmp_path / "rank-0"
    path.write_bytes(b"step 3".ljust(TEXT_BYTES, b"\0") + struct.pack("<qq", JOINED, 7))
    state = read_breadcrumb(path)
    assert state == BreadcrumbState("step 3", JOINED, 7)
    assert (state.beat_time, state.text_time) == (0, 0)


def test_a_rank_that_ends_removes_it(tmp_path: Path) -> None:
    crumb = Breadcrumb(tmp_path / "rank-0")
    crumb.end()
    crumb.end()
    assert list(tmp_path.iterdir()) == []
