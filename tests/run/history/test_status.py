"""`mpctl status`: what a run does at this moment, read from what it writes, whatever is damaged."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from mpctl.records.rundir.blamed import BlameRecord
from mpctl.records.rundir.breadcrumb import JOINED, BreadcrumbState
from mpctl.records.rundir.launcher import START_TOLERANCE, this_launcher
from mpctl.run.history.saved import is_running
from mpctl.run.history.status import status_of
from mpctl.run.launch.attempt import AttemptPhase, AttemptState, NodeState, RankState
from mpctl.run.launch.status_file import StatusFile
from tests.cli.calls import Mpctl
from tests.run.history.made import FAILURE, launched, make_run, record, summary
from tests.run.launch.attempts import new_breadcrumb, report, state_of


def going_on(run: Path, **launcher: Any) -> Path:
    """A run whose launcher is this process, at step 5 of 20, with two ranks in step 6."""
    make_run(run, steps=5, checkpoints=(4,))
    last = {**record(5), "time": time.time() - 1}
    (run / "metrics.jsonl").write_text(json.dumps(record(4)) + "\n" + json.dumps(last) + "\n")
    now = time.time()
    words = (f"step 6, forward of micro batch {rank}" for rank in range(2))
    report(run, *(BreadcrumbState(text, JOINED, 1, now, now) for text in words))
    return launched(run, hosts=["n1", "n2"], **launcher)


def test_ranks_of_a_grid_say_their_place_in_it(tmp_path: Path) -> None:
    square = {"parallel.tp": 4, "parallel.tensor_mode": "2d", "cluster.gpus_per_node": 4}
    run = make_run(tmp_path / "grid", **square)
    places = [rank["coords"] for rank in status_of(run, "grid")["ranks"]]
    assert places[2] == {"tp": 2, "col": 0, "row": 1, "cp": 0, "dp": 0, "pp": 0}


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    document = status_of(going_on(tmp_path / "demo"), "demo")
    assert (document["status"], document["step"], document["steps"]) == ("running", 5, 20)
    assert document["seconds_left"] == 15 * document["step_seconds"] == 7.5
    assert document["last_step_seconds"] == pytest.approx(1, abs=0.9)
    assert document["checkpoint"] is not None and document["checkpoint"]["step"] == 4
    assert document["launcher"] is not None and document["launcher"]["is_alive"] is True
    first, second = document["ranks"]
    assert (first["host"], second["host"]) == ("n1", "n2")
    assert second["coords"] == {"tp": 1, "cp": 0, "dp": 0, "pp": 0}
    assert second["doing"] == "step 6, forward of micro batch 1"
    assert second["heartbeat_seconds"] is not None and second["heartbeat_seconds"] < 5
    assert document["waiting"] is None and not document["is_stopping"]


def test_the_same_in_words(tmp_path: Path, call: Mpctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = call("status", going_on(tmp_path / "demo"))
    assert said.code == 0 and "\x1b" not in said.out
    lines = said.out.splitlines()
    assert lines[0] == "demo  running  step 5 of 20 (25 %), 0:00:08 left"
    assert "ranks          2, all with a heartbeat in the last 5 s" in lines
    assert "  rank 1       step 6, forward of micro batch 1" in lines
    assert not any(line.startswith("!") for line in lines)


def test_hosts_that_are_blamed_for_failures(tmp_path: Path, call: Mpctl) -> None:
    run = make_run(tmp_path / "demo", **{"launch.spare_nodes": 1})
    assert status_of(run, "demo")["blamed"] == []
    path = run / "nodes" / "blamed.json"
    path.parent.mkdir(exist_ok=True)
    blames = BlameRecord.of(path, None)
    for host, error in (("n1", "lost"), ("n2", "killed by signal 9"), ("n2", "it computes")):
        blames.add(host, error, 1_700_000_000.0)
    first, second = status_of(run, "demo")["blamed"]
    assert first == {
        "host": "n2",
        "failures": 2,
        "last": "2023-11-14T22:13:20+00:00",
        "error": "it computes",
        "is_excluded": True,
    }
    assert (second["host"], second["failures"], second["is_excluded"]) == ("n1", 1, False)
    said = " ".join(call("status", run).out.split())
    assert "blamed n2 for 2 failures, not to be used again; the last at" in said
    assert "n1 for 1 failure; the last at" in said
    path.write_text("[]")
    assert status_of(run, "demo")["blamed"] == []


def test_the_load_of_experts_is_a_median_of_the_last_steps(tmp_path: Path, call: Mpctl) -> None:
    run = going_on(tmp_path / "demo")
    assert status_of(run, "demo")["experts"] is None
    figures = {"aux_loss": 0.02, "rank_load": 1.25, "near_ties": 0}
    steps = [{**record(n), **figures, "expert_load": n / 2} for n in (2, 3, 5)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    assert status_of(run, "demo")["experts"] == {**figures, "expert_load": 1.5}
    assert "fullest expert 1.50, fullest rank 1.25 times the mean" in call("status", run).out


def test_a_rank_without_a_heartbeat_is_named(tmp_path: Path, call: Mpctl) -> None:
    run = going_on(tmp_path / "demo")
    report(run, BreadcrumbState("step 6", JOINED, 1, time.time()), BreadcrumbState("step 6"))
    assert status_of(run, "demo")["ranks"][1]["heartbeat_seconds"] is None
    later = status_of(run, "demo", time.time() + 30)
    assert 30 <= (later["ranks"][0]["heartbeat_seconds"] or 0) < 35


def test_ranks_that_do_the_same_are_one_row(tmp_path: Path, call: Mpctl) -> None:
    run = going_on(tmp_path / "demo")
    report(run, *[BreadcrumbState("step 6, backward")] * 2)
    assert "  ranks 0-1    step 6, backward" in call("status", run).out


def test_whom_ranks_wait_for_when_no_step_is_done(tmp_path: Path, call: Mpctl) -> None:
    """Rank 1 has not joined the all-reduce in which rank 0 waits."""
    run = going_on(tmp_path / "demo")
    (run / "metrics.jsonl").write_text(json.dumps({**record(5), "time": time.time() - 60}) + "\n")
    shared_states = [new_breadcrumb() for _ in range(2)]
    groups = [shared_state.collectives.group("tp", range(2)) for shared_state in shared_states]
    assert groups[0] is not None
    groups[0].wait(groups[0].start("all_reduce", 1024))
    report(run, *map(state_of, shared_states))
    said = call("status", run)
    assert "! rank 1 did not join" in said.out and "tp" in said.out


def test_the_state_of_a_process_is_told_and_a_rank_of_a_host_that_said_nothing(tmp_path: Path) -> None:
    run = going_on(tmp_path / "demo")
    shared_state = BreadcrumbState("step 6, backward", JOINED, 9, time.time(), time.time())
    state = AttemptState([NodeState(host="n2", ranks={1: RankState("stopped", 0.0, shared_state)})])
    StatusFile(run / "nodes" / "status.json").write(state, AttemptPhase.RUNNING)
    first, second = status_of(run, "demo")["ranks"]
    assert (first["doing"], first["process"]) == ("", None)
    assert (second["doing"], second["process"]) == ("step 6, backward", "stopped")


def test_a_run_that_has_restarted_says_so(tmp_path: Path, call: Mpctl) -> None:
    run = going_on(tmp_path / "demo")
    assert "attempts" not in call("status", run).out
    StatusFile(run / "nodes" / "status.json", attempt=2).write(AttemptState([]), AttemptPhase.RUNNING)
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "launcher.log").write_text("2026-01-01T00:00:00Z $ mpctl launch\n" * 3)
    document = status_of(run, "demo")
    assert (document["attempts"], document["launches"]) == (2, 3)
    assert "attempts       2: it failed and started again; launched 3 times" in call("status", run).out


def test_status_again_until_the_run_has_ended(tmp_path: Path, call: Mpctl, monkeypatch: pytest.MonkeyPatch) -> None:
    run, paused = going_on(tmp_path / "demo"), []

    def end(seconds: float) -> None:
        paused.append(seconds)
        (run / "launcher.json").unlink()

    monkeypatch.setattr(time, "sleep", end)
    said = call("status", run, "--watch", 5)
    assert said.code == 0 and paused == [5.0]
    assert [line.split()[1] for line in said.out.splitlines() if line.startswith("demo ")] == ["running", "interrupted"]


def test_a_run_that_is_asked_to_stop(tmp_path: Path, call: Mpctl) -> None:
    run = going_on(tmp_path / "demo")
    (run / "stop-request").touch()
    assert call("status", run).out.startswith("demo  running (stopping)  step 5 of 20")


def test_a_run_whose_launcher_is_gone(tmp_path: Path, call: Mpctl) -> None:
    """The process id is used by another process now: this one."""
    began = this_launcher("local").process_started or 0
    run = going_on(tmp_path / "demo", process_started=began - 2 * START_TOLERANCE)
    assert not is_running(run)
    document = status_of(run, "demo")
    assert document["status"] == "interrupted" and document["seconds_left"] is None
    text = call("status", run).out
    assert "it has ended" in text and "ranks          2; when they ended:" in text
    assert "mpctl launch --resume --run-dir" in text


def test_a_failed_run_names_the_rank_and_its_host(tmp_path: Path, call: Mpctl) -> None:
    ended = summary("failed", failure={**FAILURE, "host": "n2"})
    run = make_run(tmp_path / "demo", steps=4, ended=ended)
    text = " ".join(call("status", run).out.split())
    assert "rank 1 (n2; tp 1, dp 0) failed at step 5, forward: RuntimeError: out of memory" in text


@pytest.mark.parametrize("name", ["job.json", "metrics.jsonl", "launcher.json", "nodes/status.json"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"{}", b"[1, 2]", b'{"pid": "x"}'])
def test_damaged_files_are_no_reason_to_fail(tmp_path: Path, call: Mpctl, name: str, content: bytes) -> None:
    run = going_on(tmp_path / "demo")
    (run / name).write_bytes(content)
    assert call("status", run).code == 0
    assert call("status", run, "--json").document["schema"] == "mpctl.status/1"


def test_no_run_is_refused(tmp_path: Path, call: Mpctl) -> None:
    said = call("status", tmp_path, "--json")
    assert said.code == 2 and "no-run" in said.issues


def test_a_thousand_ranks_in_a_few_lines(tmp_path: Path, call: Mpctl) -> None:
    run = make_run(tmp_path / "big", steps=3, **{"cluster.nodes": 500, "parallel.dp": 500})
    launched(run, hosts=[f"n{node}" for node in range(500)])
    words = (f"step 4, forward of micro batch {rank % 2}" for rank in range(1000))
    report(run, *map(BreadcrumbState, words))
    began = time.process_time()
    said = call("status", run)
    assert time.process_time() - began < 10
    text = " ".join(said.out.split())
    assert "ranks 0, 2 and 498 more step 4, forward of micro batch 0" in text
    assert "hosts 500: n0, n1, n2, n3, ... n499" in text and len(said.out.splitlines()) < 14
