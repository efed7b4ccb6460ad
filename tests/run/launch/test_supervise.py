"""However a run ends, it reports that, names the rank at fault, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from mpctl.cli.signals import ended_by_signals
from mpctl.core.errors import Issue, RunFailed
from mpctl.records.checkpoint.folder import list_checkpoints
from mpctl.records.checkpoint.verify import find_damage
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.launcher import write_stop_request
from mpctl.run.clusters import local
from mpctl.run.clusters.local import LocalAttempt, LocalCluster
from mpctl.run.hosts.machine import Machine
from mpctl.run.launch import supervise
from mpctl.run.launch.attempt import AttemptPhase, AttemptState, NodeState
from mpctl.run.launch.follow import RecordReader
from mpctl.run.launch.launch_plan import LaunchPlan, plan_launch
from mpctl.run.launch.set_up import set_up_run as write_run
from mpctl.run.launch.status_file import StatusFile, read_status
from mpctl.run.launch.summary import summarise
from mpctl.run.launch.supervise import SaveMonitor
from mpctl.spec.job import JobSpec
from mpctl.spec.launch import LaunchSpec
from tests.run.launch.attempts import Saying
from tests.run.launch.command import Launched, endless, launch, poison, wait_for
from tests.train.runtime.tiny import tiny_job, tiny_plan


def test_a_stop_waits_for_the_save_of_the_first_step(tmp_path: Path) -> None:
    """A step that is validated is saved before its record is written."""
    run, saves = RunDir(tmp_path), SaveMonitor(on_event=print)
    attempt = Saying("saving step 1: 1 GiB of 2 GiB written")
    watched = supervise.WatchedAttempt(attempt, StatusFile(run.status))
    reader, stops = RecordReader(run.metrics), supervise.StopRequests([15])
    grace = supervise.StopGracePeriod(watched, LaunchSpec(stop_seconds=60.0), stops, print)
    assert not grace.is_open(reader, saves) and not attempt.is_asked
    saves.poll(attempt)
    assert grace.is_open(reader, saves) and attempt.is_asked
    report = read_status(run.status)
    assert report is not None and report.phase is watched.phase is AttemptPhase.STOPPING
    stops.received.append(15)
    assert not grace.is_open(reader, saves)


def written(folder: Path, job: JobSpec) -> LaunchPlan:
    """The launch of a job, with its files in the run directory."""
    plan = plan_launch(tiny_plan(job), RunDir(folder), Machine(2, 0, 2**40))
    write_run(plan, overwrite=False, resume=False, on_progress=lambda *_: None)
    return plan


class Unstartable(LocalCluster):
    """A host whose ranks cannot be started the first two times."""

    failures: ClassVar[list[RunFailed]] = []

    def start(self, plan: LaunchPlan) -> LocalAttempt:
        if self.failures:
            raise self.failures.pop()
        return super().start(plan)


@pytest.mark.parametrize(("restarts", "status"), [pytest.param(2, "finished", marks=pytest.mark.slow), (1, "failed")])
def test_ranks_that_cannot_be_started_cost_a_restart(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int, status: str
) -> None:
    """A host that does not answer at a start is a failure like others: it proves nothing about the
    next start."""
    errors = [RunFailed("host n0: no answer") for _ in range(2)]
    monkeypatch.setattr(Unstartable, "failures", errors)
    job = tiny_job(data, 1, 1, launch__max_restarts=restarts, training__steps=2)
    plan = written(tmp_path / "run", job)
    events: list[str] = []
    cluster = Unstartable(plan.run, LocalCluster.of(plan.run).hosts)
    outcome = supervise.run_launch(plan, cluster, lambda _: None, events.append)
    assert (outcome.status, outcome.attempts) == (status, restarts + 1), outcome.failure
    assert "host n0: no answer" in events[0]
    if outcome.failure is not None:
        assert outcome.failure.rank is None and "no answer" in str(outcome.failure)
        summary = summarise(tiny_plan(job), plan, outcome, command="")
        assert summary["status"] == "failed"


class Lost(LocalCluster):
    """A host that is lost and stays away; somebody asks for a stop meanwhile."""

    def start(self, plan: LaunchPlan) -> LocalAttempt:
        raise RunFailed("host n0: no answer")

    def recover(self, least: int, is_stopped: Callable[[], bool]) -> list[Issue]:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert is_stopped()
        return [Issue("host-did-not-connect", "n0", "its node agent did not connect", "")]


def test_a_stop_while_a_lost_host_is_waited_for_is_no_failure(data: Path, tmp_path: Path) -> None:
    """Slurm would requeue a job that failed for a lost host, and `mpctl stop` would not end it."""
    job = tiny_job(data, 1, 1, launch__max_restarts=1)
    plan = written(tmp_path / "run", job)
    cluster = Lost(plan.run, LocalCluster.of(plan.run).hosts)
    outcome = supervise.run_launch(plan, cluster, lambda _: None, print)
    assert (outcome.status, outcome.exit_code) == ("stopped", 128 + signal.SIGUSR1)


class Unkillable(LocalCluster):
    """A host on which torchrun waits for a file system that does not answer."""

    def start(self, plan: LaunchPlan) -> Any:
        attempt = Saying("step 3")
        attempt.state = AttemptState([NodeState(host="n0", code=1, unkilled=[4711])])
        return attempt


def test_a_process_that_cannot_be_killed_is_reported_and_left(data: Path, tmp_path: Path) -> None:
    plan = written(tmp_path / "run", tiny_job(data))
    events: list[str] = []
    cluster = Unkillable(plan.run, LocalCluster.of(plan.run).hosts)
    outcome = supervise.run_launch(plan, cluster, lambda _: None, events.append)
    assert outcome.status == "failed"
    assert [event for event in events if "host n0: process 4711 cannot be killed" in event]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_finishes_the_step_and_saves(data: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    """SIGINT: test_terminal.py."""
    run = endless(data, tmp_path / "run", "--tp", "2").at_step(3)
    run.process.send_signal(number)
    run.ended()
    assert run.process.returncode == code
    assert not run.left_behind()
    summary = run.summary
    assert (summary["status"], summary["signal"]) == ("stopped", number)
    saved = list_checkpoints(run.run_dir / "checkpoints")
    assert all(find_damage(folder) == [] for _, folder in saved)
    assert [step for step, _ in saved] == [summary["steps"]] == [run.records[-1]["step"]]
    assert all(rank["agrees"] for rank in summary["plan_beside_run"])


@pytest.mark.slow
def test_a_second_signal_kills_at_once(data: Path, tmp_path: Path) -> None:
    run = endless(data, tmp_path / "run", "--tp", "2").at_step(1)
    run.worker(1).suspend()  # so that no step can be finished
    run.process.send_signal(signal.SIGINT)
    wait_for(lambda: "repeat it to stop at once" in run.stderr)
    time.sleep(0.3)
    assert run.process.poll() is None
    asked = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    run.ended()
    assert run.process.returncode == 130 and time.monotonic() - asked < 3
    assert not run.left_behind()
    assert (run.summary["status"], run.summary["checkpoint"]) == ("stopped", 0)


@pytest.mark.slow
def test_a_stop_that_takes_too_long_is_ended(data: Path, tmp_path: Path) -> None:
    run = endless(data, tmp_path / "run", "--tp", "2", "--set", "launch.stop_seconds=1").at_step(1)
    run.worker(0).suspend()
    run.process.send_signal(signal.SIGTERM)
    assert run.ended(10).process.returncode == 143
    assert not run.left_behind()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("victim", ["rank", "torchrun"])
def test_the_signal_that_ended_a_process_is_named(
    data: Path, tmp_path: Path, victim: str, number: signal.Signals
) -> None:
    """Schedulers send SIGTERM, and torchrun ends the other ranks by it."""
    run = endless(data, tmp_path / "run", "--dp", "2").at_step(2)
    process, killed = run.worker(1), time.monotonic()
    process = process.parent() or process if victim == "torchrun" else process
    process.send_signal(number)
    run.ended()
    assert time.monotonic() - killed < 60  # its peers would wait 300 s for it
    assert run.process.returncode == 1
    failure = run.summary["failure"]
    assert f"killed by signal {number.value} ({number.name}" in failure["error"]
    assert failure["rank"] == (1 if victim == "rank" else None)
    assert failure["error"].startswith("torchrun") == (victim == "torchrun")
    assert number.name in run.stderr
    assert not run.left_behind(3)
    if victim == "rank":
        assert (failure["coords"]["tp"], failure["coords"]["dp"]) == (0, 1)
        assert failure["last_lines"][-1].startswith("step ")
        assert "rank 1 (tp 0, cp 0, dp 1, pp 0)" in run.stderr
        assert failure["last_lines"][-1] in run.stderr
        assert "rank 1 of 2" in Path(failure["log"]).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["starting", "training"])
def test_no_worker_outlives_a_killed_launcher(data: Path, tmp_path: Path, when: str) -> None:
    run = endless(data, tmp_path / "run", "--tp", "2")
    if when == "training":
        run.at_step(2)
    else:
        wait_for(lambda: len(psutil.Process(run.process.pid).children(recursive=True)) >= 3)
        run.remember()
    run.process.kill()
    run.process.wait()
    orphans = run.left_behind(3)
    for process in orphans:
        process.kill()
    assert len(run.family) >= 3 and not orphans


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "at_fault"), [(1, {1}), (2, {2, 3})])
def test_a_worker_that_raises_is_distinguished_from_its_secondary_failures(
    data: Path, tmp_path: Path, tp: int, at_fault: set[int]
) -> None:
    step = poison(data, tmp_path / "data", dp_rank=1, dp=2)
    run = launch(tmp_path / "data", tmp_path / "run", "--tp", str(tp), "--dp", "2").ended()
    failure = run.summary["failure"]
    assert run.process.returncode == 1 and run.summary["status"] == "failed"
    assert failure["rank"] in at_fault and failure["coords"]["dp"] == 1
    assert failure["doing"] == f"step {step}" and run.records[-1]["step"] == step - 1
    assert "token 60000" in failure["error"] and "token 60000" in run.stderr
    assert any("Traceback" in line or "InputError" in line for line in failure["last_lines"])
    assert len(list((run.run_dir / "logs").glob("rank-*.log"))) == 2 * tp


# Imported by every Python process as it starts: rank 2, which is a new process or is forked, exits
# without an error when triggered.
_LEAVES = """
import os, threading, time
def leave():
    while not os.path.exists(os.environ["LEAVE"]):
        time.sleep(0.01)
    if os.environ.get("RANK") == "2":
        os._exit(0)
def watch():
    threading.Thread(target=leave, daemon=True).start()
os.register_at_fork(after_in_child=watch)
if "RANK" in os.environ:
    watch()
"""


@pytest.mark.slow
def test_a_rank_that_leaves_with_exit_code_0_is_named(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_LEAVES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("LEAVE", str(tmp_path / "leave"))
    four = ("--pp", "2", "--dp", "2", "--set", "cluster.gpus_per_node=4")
    run = endless(data, tmp_path / "run", *four, "--set", "launch.timeout_seconds=10").at_step(2)
    (tmp_path / "leave").touch()
    assert run.ended().process.returncode == 1 and not run.left_behind(3)
    failure = run.summary["failure"]
    assert (failure["rank"], failure["coords"]["pp"]) == (2, 1), run.stderr
    words, _, missed = failure["error"].partition("; it ")
    assert words == "exited with code 0 before the last step"
    # what its peers waited for, if they did
    assert missed == "" or missed.startswith(("did not ", "joined and did not finish "))


@pytest.mark.slow  # tests/train/runtime/test_step_guard.py has a fast one
def test_a_loss_that_explodes_is_a_failure(data: Path, tmp_path: Path) -> None:
    keys = ("training.learning_rate=1e6", "training.warmup_steps=0")
    run = launch(data, tmp_path / "run", *(part for key in keys for part in ("--set", key)))
    assert run.ended().process.returncode == 1
    failure = run.summary["failure"]
    assert failure["rank"] == 0 and "first on rank 0, its " in failure["error"]
    assert run.summary["checkpoint"] == 0
    assert "NaN" not in (run.run_dir / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_restart_continues_the_same_curve(data: Path, finished: Launched, tmp_path: Path) -> None:
    run = launch(
        data, tmp_path / "run", "--tp", "2", "--set", "launch.max_restarts=1", "--set", "checkpoint.interval=3"
    )
    wait_for(lambda: list_checkpoints(run.run_dir / "checkpoints"))
    run.remember()
    run.worker(0).kill()
    run.ended()
    assert run.process.returncode == 0, run.stderr
    assert run.summary["attempts"] == 2
    assert "SIGKILL" in run.stderr and "starting again from step" in run.stderr
    assert [record["step"] for record in run.records] == list(range(1, 21))
    assert run.losses == pytest.approx(finished.losses, rel=1e-6)
    assert (run.run_dir / "logs/torchrun.log").read_text().count("\n$ ") == 2


@pytest.mark.slow
def test_a_taken_port_costs_one_more_try(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = written(tmp_path / "run", tiny_job(data, training__steps=2))
    events: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], local.free_port()])
        monkeypatch.setattr(local, "free_port", lambda ranks: next(ports))
        cluster = LocalCluster.of(prepared.run)
        outcome = supervise.run_launch(prepared, cluster, lambda _: None, events.append)
    assert (outcome.status, outcome.attempts) == ("finished", 1)
    assert len(events) == 1 and "port" in events[0]


@pytest.mark.slow
def test_a_port_taken_twice_is_a_failure_with_the_reason(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = written(tmp_path / "run", tiny_job(data))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(local, "free_port", lambda ranks: taken.getsockname()[1])
        cluster = LocalCluster.of(prepared.run)
        outcome = supervise.run_launch(prepared, cluster, lambda _: None, lambda _: None)
    assert outcome.status == "failed" and outcome.failure.rank is None
    assert any("EADDRINUSE" in line for line in outcome.failure.last_lines)


@pytest.mark.slow
def test_two_launches_side_by_side(data: Path, tmp_path: Path) -> None:
    keys = ("--tp", "2", "--set", "training.steps=2")
    both = [launch(data, tmp_path / name, *keys) for name in ("one", "two")]
    assert [run.ended().process.returncode for run in both] == [0, 0]
    assert both[0].losses == both[1].losses


def test_a_stop_request_counts_once_and_an_urgent_one_twice(tmp_path: Path) -> None:
    """Also after Ctrl-C: a request to finish the step is no second signal, which would kill."""
    path, stops = tmp_path / "stop-request", supervise.StopRequests([signal.SIGINT])
    stops.poll(path)
    write_stop_request(path, now=False)
    for _ in range(2):
        stops.next_poll = 0.0
        stops.poll(path)
    assert stops.received == [signal.SIGINT]
    write_stop_request(path, now=True)
    stops.next_poll = 0.0
    stops.poll(path)
    assert stops.received == [signal.SIGINT, signal.SIGTERM] and stops.cause == "SIGINT"


def test_the_cause_of_a_stop_is_reported(tmp_path: Path) -> None:
    write_stop_request(tmp_path / "stop-request", now=False)
    stops = supervise.StopRequests()
    stops.poll(tmp_path / "stop-request")
    assert (stops.received, stops.cause) == ([signal.SIGTERM], "mpctl stop")


def test_a_request_of_an_earlier_launch_does_not_stop_the_next(data: Path, tmp_path: Path) -> None:
    plan = written(tmp_path, tiny_job(data))
    write_stop_request(plan.run.stop_request, now=True)
    write_run(plan, overwrite=False, resume=True, on_progress=lambda *_: None)
    assert not plan.run.stop_request.exists() and plan.run.launcher.exists()


def test_the_signal_handlers_are_restored() -> None:
    asked = [signal.SIGTERM, signal.SIGUSR1]
    before = [signal.getsignal(number) for number in asked]
    with supervise.StopRequests().listening() as stops:
        for number in asked:
            os.kill(os.getpid(), number)
        assert stops.received == asked
    assert [signal.getsignal(number) for number in asked] == before


def test_closing_the_terminal_of_nohup_is_no_request() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with supervise.StopRequests().listening() as stops, ended_by_signals("not stopped"):
            signal.raise_signal(signal.SIGHUP)
        assert stops.received == []
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with supervise.StopRequests().listening() as stops:
            signal.raise_signal(signal.SIGHUP)
        assert stops.received == [signal.SIGHUP]
        with pytest.raises(SystemExit) as caught, ended_by_signals("stopped"):
            signal.raise_signal(signal.SIGHUP)
        assert caught.value.code == 128 + signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)
