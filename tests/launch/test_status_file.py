"""What the launcher knows of all ranks is in a file that any host reads."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mpctl.launch.attempt import AttemptState, NodeState, RankState
from mpctl.launch.status_file import StatusFile, read_status
from mpctl.rundir.breadcrumb import JOINED, BreadcrumbState
from mpctl.rundir.collective_log import CollectiveProgress, GroupProgress
from tests.launch.attempts import Saying


def test_the_state_is_read_back_as_it_was(tmp_path: Path) -> None:
    group = GroupProgress("tp", "0-1", 7, 6, "all_reduce", 1024)
    progress = CollectiveProgress(groups=(group,))
    crumb = BreadcrumbState("step 3", JOINED, 12, 100.5, 100.25, progress)
    attempt = Saying()
    attempt.state = AttemptState(
        [NodeState(node=1, host="n2", ranks={3: RankState("stopped", 1.5, crumb)})]
    )
    before = time.time()
    StatusFile(tmp_path / "nodes" / "status.json").update(attempt)
    report = read_status(tmp_path / "nodes" / "status.json")
    assert report is not None and before <= report.time <= time.time()
    assert report.state.nodes[0].host == "n2" and report.state.ranks == attempt.state.ranks
    read = report.state.ranks[3].breadcrumb
    assert (read.beat_time, read.text_time, read.collectives) == (100.5, 100.25, progress)


def test_it_is_written_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    status = StatusFile(tmp_path / "status.json")
    status.update(Saying("one"))
    status.update(Saying("two"))
    report = read_status(status.path)
    assert report is not None and report.state.ranks[0].breadcrumb.doing == "one"
    status.next_write = 0.0
    status.update(Saying("two"))
    report = read_status(status.path)
    assert report is not None and report.state.ranks[0].breadcrumb.doing == "two"
    status.write(Saying("three").state)
    report = read_status(status.path)
    assert report is not None and report.state.ranks[0].breadcrumb.doing == "three"
    assert list(tmp_path.iterdir()) == [status.path]


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a file")
    StatusFile(tmp_path / "nodes" / "status.json").update(Saying("one"))


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"time": "x", "state": {}}', b"\xff"])
def test_other_content_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "status.json").write_bytes(content)
    assert read_status(tmp_path / "status.json") is None
    assert read_status(tmp_path) is None
