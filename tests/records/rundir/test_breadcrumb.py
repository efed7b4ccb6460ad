"""A rank's breadcrumb outlives the rank and is read by whoever started it; it needs no file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpctl.records.rundir import breadcrumb
from mpctl.records.rundir.breadcrumb import (
    BREADCRUMBS,
    FINISHED,
    JOINED,
    RANK_BYTES,
    STARTED,
    TEXT_BYTES,
    Breadcrumb,
    BreadcrumbState,
    HostBreadcrumbs,
    rank_memory,
)
from mpctl.records.rundir.collective_log import GroupProgress
from mpctl.train.runtime.process import failure_record
from tests.run.launch.attempts import new_breadcrumb, state_of

KILLED = """
import os, signal
from mpctl.records.rundir.breadcrumb import JOINED, Breadcrumb, rank_memory
shared_state = Breadcrumb(rank_memory(6, os.environ))
shared_state.reach(JOINED, "joined")
shared_state.write("step 7, forward of micro batch 2")
shared_state.beat()
tp = shared_state.collectives.group("tp", (2, 3))
tp.wait(tp.start('all_reduce', 4096))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_what_a_killed_rank_wrote_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_memory: bool) -> None:
    """Through memory without a name; through a file of the folder where a system has none."""
    if not is_in_memory:
        monkeypatch.delattr(breadcrumb.os, "memfd_create")
    host = HostBreadcrumbs(range(4, 8), tmp_path)
    assert len(list(tmp_path.iterdir())) == (0 if is_in_memory else 1)
    ended = subprocess.run([sys.executable, "-c", KILLED], env={**os.environ, **host.environment})
    host.close()
    assert ended.returncode == -9 and list(tmp_path.iterdir()) == []
    state = host.state(6)
    assert (state.doing, state.start, state.beats) == ("step 7, forward of micro batch 2", JOINED, 1)
    assert state.collectives.waits_in == GroupProgress("tp", "2-3", 1, 0, "all_reduce", 4096)
    assert [host.state(rank) for rank in (4, 5, 7)] == [BreadcrumbState()] * 3


def test_a_rank_that_recorded_its_failure_has_failed(tmp_path: Path) -> None:
    host = HostBreadcrumbs(range(2), tmp_path)
    shared_states = [Breadcrumb(rank_memory(rank, host.environment)) for rank in range(2)]
    assert not host.has_failed
    record = failure_record(ValueError("x" * 9), rank=1, coords={"tp": 1}, doing="step 3")
    shared_states[1].fail(record)
    assert host.has_failed and host.state(1) == BreadcrumbState("starting", STARTED)
    assert host.failures() == [record] and host.state(0) == BreadcrumbState("starting", STARTED)
    shared_states[0].fail({**record, "rank": 0, "traceback": [f"{n}" * 4000 for n in range(9)]})
    first, second = host.failures()
    assert (first["rank"], second) == (0, record)
    assert [entry[0] for entry in first["traceback"]] == ["5", "6", "7", "8"]


def test_ranks_are_asked_to_stop(tmp_path: Path) -> None:
    host = HostBreadcrumbs(range(2), tmp_path)
    shared_states = [Breadcrumb(rank_memory(rank, host.environment)) for rank in range(2)]
    assert not any(shared_state.stop_requested for shared_state in shared_states)
    host.request_stop()
    assert all(shared_state.stop_requested for shared_state in shared_states)


def test_ranks_have_joined_when_all_have(tmp_path: Path) -> None:
    host = HostBreadcrumbs(range(2), tmp_path)
    shared_states = [Breadcrumb(rank_memory(rank, host.environment)) for rank in range(2)]
    shared_states[0].reach(JOINED, "building")
    assert not host.has_joined
    shared_states[1].reach(JOINED, "building")
    shared_states[0].end()
    assert host.has_joined


def test_without_anybody_who_reads_it_a_rank_writes_for_itself() -> None:
    shared_state = Breadcrumb(rank_memory(3, {}))
    shared_state.write("step 1")
    assert state_of(shared_state).doing == "step 1" and BREADCRUMBS not in os.environ


def test_a_long_text_is_cut_and_a_short_one_replaces_it() -> None:
    shared_state = new_breadcrumb()
    shared_state.write("é" * TEXT_BYTES)
    assert state_of(shared_state).doing == "é" * (TEXT_BYTES // 2)
    shared_state.write("x" + "é" * TEXT_BYTES)
    assert state_of(shared_state).doing.endswith("é\N{REPLACEMENT CHARACTER}")
    shared_state.write("saving")
    assert state_of(shared_state) == BreadcrumbState("saving", STARTED, 0)
    assert len(shared_state.memory) == RANK_BYTES


def test_beat_and_text_have_their_times() -> None:
    began = time.time()
    shared_state = new_breadcrumb()
    assert state_of(shared_state).beat_time == 0
    shared_state.beat()
    state = state_of(shared_state)
    assert began <= state.text_time <= state.beat_time <= time.time()


def test_a_rank_that_ends_leaves_nothing_of_it() -> None:
    shared_state = new_breadcrumb()
    shared_state.beat()
    shared_state.end()
    assert state_of(shared_state) == BreadcrumbState("", FINISHED) and shared_state.has_ended
    assert not state_of(shared_state).is_working
