"""A bench as a launch: answers as they come, its files, a rank that fails, a stop, refusals."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from mpctl.core.errors import InputError, RunFailed
from mpctl.measure.bench.probe import probe_answers, require_probes
from mpctl.plan.planning.plan import Plan
from mpctl.records.rundir.directory import RunDir
from mpctl.run.history.listing import list_runs
from mpctl.run.history.saved import read_run
from mpctl.spec.load import load_job
from tests.train.runtime.tiny import settings, tiny_plan

ROUNDS = 2


def plan_of(tp: int = 2, **changes: Any) -> Plan:
    """A job without data, which a training would be refused for."""
    return tiny_plan(load_job(None, settings(tp, **changes)))


def layers(rounds: int = ROUNDS, mode: str = "1d") -> dict[str, object]:
    return {"task": "layers", "cases": [{"mode": mode, "depth": None}], "rounds": rounds, "steps": 1, "seconds": None}


def ask(
    run: Path, request: dict[str, object], plan: Plan | None = None, then: Callable[[Any], None] = lambda answer: None
) -> tuple[bool, list[Any]]:
    """Whether all answers came, and which."""
    answers: list[Any] = []

    def on_answer(answer: Any) -> None:
        answers.append(answer)
        then(answer)

    ended = probe_answers(plan or plan_of(), request, RunDir(run), on_answer=on_answer, on_event=print)
    return ended.is_complete, answers


def ranks_left() -> list[psutil.Process]:
    """The processes of ranks, and of what starts them, that still run below this one."""
    below = psutil.Process().children(recursive=True)
    return [p for p in below if any(word.startswith("mpctl.train.runtime.") for word in p.cmdline())]


@pytest.mark.slow
def test_every_answer_is_handed_out_and_kept(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "ranks-r1")
    is_complete, answers = ask(run.path, layers())
    assert is_complete
    assert [answer["event"] for answer in answers] == ["sizes", "sizes", *["timing"] * ROUNDS]
    assert all(answer["seconds"] > 0 for answer in answers if answer["event"] == "timing")
    assert [json.loads(line) for line in run.answers.read_text().splitlines()] == answers
    assert json.loads(run.bench.read_text()) == layers()
    assert [report["rank"] for report in run.rank_reports()] == [0, 1]
    assert not run.data.exists() and not run.metrics.exists() and not ranks_left()
    summary = json.loads(run.summary.read_text())
    assert (summary["status"], summary["plan_beside_run"]) == ("finished", [])
    assert not list_runs(tmp_path)["runs"] and read_run(run.path).steps is None
    is_complete, again = ask(run.path, layers(rounds=1))  # replaces what was there
    assert is_complete and len(again) == 3 == len(run.answers.read_text().splitlines())


@pytest.mark.slow
def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"rank [01] .* failed at .*no probe answers 'polish'"):
        ask(tmp_path / "ranks-r1", {"task": "polish"})
    assert not ranks_left()


@pytest.mark.slow
def test_a_stop_keeps_the_answers_so_far(tmp_path: Path) -> None:
    """As Ctrl-C does: the launcher gets a SIGINT and the ranks end at once."""

    def stop(answer: Any) -> None:
        if answer["event"] == "timing":
            signal.raise_signal(signal.SIGINT)

    is_complete, answers = ask(tmp_path / "ranks-r1", layers(rounds=10**9), then=stop)
    assert not is_complete and answers[-1]["event"] == "timing" and not ranks_left()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    """The watch for hangs is that of a training."""

    def stop(answer: Any) -> None:
        if answer["event"] == "timing" and answer["round"] == 0:
            (rank,) = (p for p in ranks_left() if p.environ().get("RANK") == "1")
            rank.suspend()

    with pytest.raises(RunFailed, match=r"rank 1 .* failed at measuring layers.*SIGSTOP"):
        ask(tmp_path / "ranks-r1", layers(rounds=10**9), then=stop)
    assert not ranks_left()


def test_everything_is_refused_at_once_and_before_a_rank(tmp_path: Path) -> None:
    plans = [plan_of(launch__device="cuda", launch__on="local"), plan_of(launch__device="cpu", launch__on="ssh")]
    with pytest.raises(InputError) as refused:
        require_probes(plans)
    assert [issue.rule for issue in refused.value.issues] == ["world-fits-machine", "hostfile"]
    with pytest.raises(InputError, match="hostfile"):
        ask(tmp_path / "ranks-r1", layers(), plans[1])
    assert not (tmp_path / "ranks-r1").exists()


def test_files_of_a_user_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="does not contain a run of mpctl"):
        ask(tmp_path, layers())
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
