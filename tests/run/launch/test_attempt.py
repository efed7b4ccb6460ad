"""The state of all ranks is in a file that any host can read."""

from __future__ import annotations

import json
import resource
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mpctl.records.rundir.breadcrumb import FINISHED, JOINED, JOINING, BreadcrumbState
from mpctl.records.rundir.collective_log import CollectiveProgress, GroupProgress
from mpctl.run.launch.attempt import NEXT, AttemptPhase, AttemptState, NodeState, RankState
from mpctl.run.launch.status_file import StatusFile, read_status
from mpctl.run.launch.supervise import WatchedAttempt
from mpctl.train.runtime.process import failure_record
from tests.run.launch.attempts import Saying


def test_the_state_is_read_back_as_it_was(tmp_path: Path) -> None:
    group = GroupProgress("tp", "0-1", 7, 6, "all_reduce", 1024)
    progress = CollectiveProgress(groups=(group,))
    shared_state = BreadcrumbState("step 3", JOINED, 12, 100.5, 100.25, progress)
    attempt = Saying()
    attempt.state = AttemptState([NodeState(node=1, host="n2", ranks={3: RankState("stopped", 1.5, shared_state)})])
    before = time.time()
    StatusFile(tmp_path / "nodes" / "status.json").write(attempt.state, AttemptPhase.FAILING)
    report = read_status(tmp_path / "nodes" / "status.json")
    assert report is not None and report.phase is AttemptPhase.FAILING and before <= report.time <= time.time()
    assert report.state.nodes[0].host == "n2" and report.state.ranks == attempt.state.ranks
    read = report.state.ranks[3].breadcrumb
    assert (read.beat_time, read.text_time) == pytest.approx((100.5, 100.25), abs=0.01)
    assert read.collectives == progress


def test_a_full_disk_does_not_fill_with_halves_of_it(tmp_path: Path) -> None:
    """One was left every two seconds."""
    status, state = StatusFile(tmp_path / "status.json"), AttemptState([NodeState(host="n1")])
    status.write(state, AttemptPhase.RUNNING)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
    try:
        for _ in range(3):
            status.write(state, AttemptPhase.FAILING)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    report = read_status(status.path)
    assert report is not None and report.phase is AttemptPhase.RUNNING
    assert list(tmp_path.iterdir()) == [status.path]


def test_it_is_written_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    attempt, status = Saying("one"), StatusFile(tmp_path / "status.json")
    watched = WatchedAttempt(attempt, status)

    def doing() -> str:
        report = read_status(status.path)
        assert report is not None and report.phase is watched.phase
        return report.state.ranks[0].breadcrumb.doing

    assert watched.poll() is AttemptPhase.STARTING and doing() == "one"
    attempt.state = Saying("two").state
    assert watched.poll() is AttemptPhase.STARTING and doing() == "one"
    status.next_write = 0.0
    watched.poll()
    assert doing() == "two"
    attempt.state = Saying("three").state
    watched.end()
    assert watched.phase is AttemptPhase.ENDED and doing() == "three"
    assert list(tmp_path.iterdir()) == [status.path]


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a file")
    status = StatusFile(tmp_path / "nodes" / "status.json")
    status.write(Saying("one").state, AttemptPhase.RUNNING)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"time": "x", "state": {}}', b"\xff"])
def test_other_content_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "status.json").write_bytes(content)
    assert read_status(tmp_path / "status.json") is None
    assert read_status(tmp_path) is None


def test_version_1_of_the_file_is_read(tmp_path: Path) -> None:
    """It had no phase."""
    rank = {"process": "running", "breadcrumb": {"doing": "step 4", "start": 3}}
    state = {"nodes": [{"host": "n1", "ranks": {"0": rank}, "failures": []}]}
    document = {"schema": "mpctl.attempt/1", "time": 1.0, "state": state}
    (tmp_path / "status.json").write_text(json.dumps(document))
    report = read_status(tmp_path / "status.json")
    assert report is not None and report.phase is AttemptPhase.RUNNING
    assert report.state.ranks[0].breadcrumb.doing == "step 4"


def test_an_attempt_never_goes_back() -> None:
    """No sequence of observed phases leads from a phase to an earlier one, and a phase that is over
    does not change."""
    order = [*AttemptPhase]
    for before, observed in product(order, order):
        after = before.then(observed)
        assert after is before or (after is observed and after in NEXT[before])
        assert order.index(after) >= order.index(before)
        assert not before.is_over or after is before
    assert AttemptPhase.FAILING.then(AttemptPhase.STOPPING) is AttemptPhase.FAILING


@pytest.mark.parametrize(
    ("hosts", "phase"),
    [
        (["starting", "running"], "starting"),
        (["running", "running"], "running"),
        (["running", "succeeded"], "running"),
        (["running", "failed"], "failing"),
        (["failing", "starting"], "failing"),
        (["succeeded", "failed"], "failed"),
        (["succeeded", "succeeded"], "succeeded"),
    ],
)
def test_the_phase_of_an_attempt_follows_from_its_hosts(hosts: list[str], phase: str) -> None:
    assert AttemptPhase.of_hosts(map(AttemptPhase, hosts)) == phase


def test_the_phase_of_a_host_follows_from_its_ranks() -> None:
    def node(*starts: int, **more: Any) -> AttemptPhase:
        ranks = {n: RankState(breadcrumb=BreadcrumbState(start=s)) for n, s in enumerate(starts)}
        return NodeState(ranks=ranks, **more).phase

    record = failure_record(ValueError("x"), rank=0, coords={}, doing="step 3")
    assert [node(), node(JOINED, JOINING)] == [AttemptPhase.STARTING] * 2
    assert [node(JOINED, JOINED), node(JOINED, FINISHED)] == [AttemptPhase.RUNNING] * 2
    assert node(JOINED, failures=[record]) is AttemptPhase.FAILING
    assert node(FINISHED, code=0) is AttemptPhase.SUCCEEDED
    assert node(JOINED, code=1) is node(JOINED, lost="silent") is AttemptPhase.FAILED
