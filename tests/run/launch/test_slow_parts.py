"""When a slow part is named, how it is recorded, and what other commands read of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mpctl.records.rundir.breadcrumb import JOINED, BreadcrumbState
from mpctl.records.rundir.slow import SlowPart, read_slow
from mpctl.records.rundir.step_log import WINDOW, StepTimes
from mpctl.run.launch.attempt import AttemptPhase, AttemptState, NodeState, RankState
from mpctl.run.launch.slow_parts import SlowPartsMonitor
from mpctl.run.launch.status_file import StatusFile, read_status
from tests.train.runtime.tiny import tiny_job


class Scene:
    """A run of dp 4 on one host, of which a test says what each rank computes, in ms."""

    def __init__(self, folder: Path) -> None:
        self.path, self.said = folder / "slow.jsonl", list[str]()
        self.slow: Sequence[SlowPart] = ()
        job = tiny_job(folder, 1, 4)
        self.monitor = SlowPartsMonitor(job, self.path, self.note)
        self.last = 0

    def note(self, slow: Sequence[SlowPart], words: Sequence[str]) -> None:
        self.slow, self.said = slow, [*self.said, *words]

    def state(self, *computing: float) -> AttemptState:
        self.last += WINDOW
        ranks = {}
        for rank, ms in enumerate(computing):
            times = StepTimes(self.last, (round(1e3 * ms),) * WINDOW, round(1e3 * max(computing)))
            shared_state = BreadcrumbState(f"step {self.last}", JOINED, steps=times)
            ranks[rank] = RankState("running", breadcrumb=shared_state)
        return AttemptState([NodeState(host="vm", ranks=ranks)])

    def after(self, *computing: float) -> list[str]:
        """What is said after WINDOW more steps."""
        self.said = []
        self.monitor.check(self.state(*computing))
        return self.said


def test_a_part_is_named_once_again_when_it_is_worse_and_when_it_is_over(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.after(35, 35, 35, 35) == []
    (text,) = scene.after(35, 35, 35, 63)
    assert text.startswith("rank 3 computes 1.8 times as long as its equals since step 21")
    assert scene.after(35, 35, 35, 70) == [] and [part.ratio for part in scene.slow] == [1.8]
    (text,) = scene.after(35, 35, 35, 105)
    assert "3.0 times" in text and "since step 21" in text
    assert scene.after(35, 35, 35, 35) == ["rank 3 is no longer slow at step 100"]
    assert scene.slow == []
    (part,) = read_slow(scene.path)
    assert (part.since, part.until, part.ratio) == (21, 100, 3.0)
    lines = [json.loads(line) for line in scene.path.read_text().splitlines()]
    assert [line["until"] for line in lines] == [None, None, 100]


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.after(35, 35, 35, 63)
    whole = scene.path.read_text()
    scene.path.write_text(f"{{}}\nnot json\n{whole}{whole[:20]}")
    assert [part.ranks for part in read_slow(scene.path)] == [(3,)]
    assert read_slow(tmp_path / "none") == []


def test_nothing_is_compared_until_all_ranks_have_reported(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.after(35, 63) == []


def test_the_status_has_what_is_slow_and_not_the_steps(tmp_path: Path) -> None:
    scene, status = Scene(tmp_path), StatusFile(tmp_path / "status.json")
    state = scene.state(35, 35, 35, 63)
    scene.monitor.check(state)
    status.slow = scene.slow
    status.write(state, AttemptPhase.RUNNING)
    report = read_status(status.path)
    assert report is not None and [part.ranks for part in report.slow] == [(3,)]
    assert "computing" not in status.path.read_text()
    assert report.state.ranks[3].breadcrumb.steps == StepTimes()
