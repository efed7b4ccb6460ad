"""The supervisor's verdicts from the states and heartbeats of processes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mpctl.records.rundir.breadcrumb import JOINED, JOINING, Breadcrumb
from mpctl.run.launch import watch
from mpctl.run.launch.attempt import AttemptPhase, AttemptState, NodeState, RankState
from mpctl.run.launch.verdict import Verdict
from mpctl.run.launch.watch import STOPPED_SECONDS, RunWatch
from mpctl.spec.launch import LaunchSpec
from tests.run.launch.attempts import new_breadcrumb, state_of
from tests.run.launch.command import endless, wait_for

CHECKS = round(STOPPED_SECONDS)
LAUNCH = LaunchSpec(start_seconds=3, timeout_seconds=4)


class Ranks:
    """Processes of one host whose states and processor times a test sets."""

    def __init__(self, breadcrumbs: list[Breadcrumb]) -> None:
        self.breadcrumbs, self.world_size = breadcrumbs, len(breadcrumbs)
        self.states: dict[int | None, str] = {}
        self.seconds: dict[int, float] = {}
        self.started = range(self.world_size)
        self.address = "127.0.0.1:29500"

    def poll(self) -> AttemptPhase:
        return AttemptPhase.RUNNING

    def request_stop(self) -> None:
        raise AssertionError

    def end(self) -> AttemptState:
        return self.snapshot()

    def stacks(self) -> dict[int, str]:
        return {rank: f"mpctl/x.py:{rank} in f" for rank in range(self.world_size)}

    def snapshot(self) -> AttemptState:
        running = psutil.STATUS_RUNNING
        ranks = {
            rank: RankState(
                self.states.get(rank, running) if rank in self.started else "",
                self.seconds.get(rank, 0.0),
                state_of(self.breadcrumbs[rank]),
            )
            for rank in range(self.world_size)
        }
        torchrun = self.states.get(None, running)
        return AttemptState([NodeState(host="n1", torchrun=torchrun, ranks=ranks)])


class Scene:
    """Two ranks that have joined, their breadcrumbs, and a watch over them."""

    def __init__(self, *, start: int = JOINED) -> None:
        self.breadcrumbs = [new_breadcrumb() for _ in range(2)]
        for shared_state in self.breadcrumbs:
            shared_state.reach(start, "training")
        self.processes = Ranks(self.breadcrumbs)
        self.watch = RunWatch(LAUNCH, 2, address="127.0.0.1:29500")

    def checks(self, count: int, between: Callable[[], None] = lambda: None) -> str:
        """The result of the last of so many checks, as `rank: error`."""
        found = None
        for _ in range(count):
            between()
            found = found or self.watch.check(self.processes.snapshot())
        return "" if found is None else f"{found.rank}: {found.error}"

    def beat(self) -> None:
        for shared_state in self.breadcrumbs:
            shared_state.beat()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_healthy_ranks_are_left_alone(scene: Scene) -> None:
    assert scene.checks(20, scene.beat) == ""


def test_a_stopped_rank_is_a_hang_after_some_checks(scene: Scene) -> None:
    scene.processes.states[1] = psutil.STATUS_STOPPED
    assert scene.checks(CHECKS - 1, scene.beat) == ""
    scene.processes.states[1] = psutil.STATUS_RUNNING  # continued in time
    assert scene.checks(1, scene.beat) == ""
    scene.processes.states[1] = psutil.STATUS_STOPPED
    assert scene.checks(CHECKS - 1, scene.beat) == ""
    assert scene.checks(1, scene.beat).startswith("1: its process is stopped (SIGSTOP")


def test_all_ranks_and_torchrun_stopped(scene: Scene) -> None:
    scene.processes.states[None] = psutil.STATUS_STOPPED
    assert "torchrun, which runs the ranks, is stopped" in scene.checks(CHECKS, scene.beat)
    scene.watch.stopped.clear()
    scene.watch.stopped_torchruns.clear()
    scene.processes.states |= {0: psutil.STATUS_STOPPED, 1: psutil.STATUS_STOPPED}
    words = scene.checks(CHECKS, scene.beat)
    assert words.startswith("0: ") and words.endswith("so is rank 1")


def test_no_time_counts_while_no_check_is_made(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher was stopped for an hour: one check, not 3600 seconds."""
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    scene.processes.states[1] = psutil.STATUS_STOPPED
    assert scene.watch.is_healthy(scene.processes)
    now[0] += 3600  # and then at most one check a second
    assert scene.watch.is_healthy(scene.processes) and scene.watch.stopped[1] == 2
    assert scene.watch.is_healthy(scene.processes) and scene.watch.stopped[1] == 2  # at most one a second


def test_a_silent_rank(scene: Scene) -> None:
    def one_beats() -> None:
        scene.breadcrumbs[0].beat()

    assert scene.checks(4, one_beats) == ""
    words = scene.checks(1, one_beats)
    assert words.startswith("1: no heartbeat and no processor time used for 4 s") and "state 'running'" in words


def test_a_rank_that_computes_without_a_heartbeat_is_not_silent(scene: Scene) -> None:
    def compute() -> None:
        scene.breadcrumbs[0].beat()
        scene.processes.seconds[1] = scene.processes.seconds.get(1, 0) + 0.5

    assert scene.checks(20, compute) == ""


def start_all_reduce(shared_state: Breadcrumb, *, waits: bool) -> int:
    tp = shared_state.collectives.group("tp", (0, 1))
    assert tp is not None
    number = tp.start("all_reduce", 4096)
    if waits:
        tp.wait(number)
    return number


def test_a_rank_that_keeps_another_waiting(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 computes and does not join; the limit is 4 s."""
    now = [100.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    start_all_reduce(scene.breadcrumbs[0], waits=True)
    for _ in range(4):
        assert scene.watch.is_healthy(scene.processes)
        scene.beat()
        scene.processes.seconds[1] = scene.processes.seconds.get(1, 0) + 1.0
        now[0] += 1.0
    assert not scene.watch.is_healthy(scene.processes)
    assert scene.watch.hang == Verdict(
        1,
        "did not join all_reduce #1 (4.0 KiB) of group tp (ranks 0-1), in which rank 0 has waited "
        "for 4 s: it computes; it is at mpctl/x.py:1 in f",
    )


def test_a_long_computation_is_no_hang_while_nobody_waits(scene: Scene) -> None:
    """One has started a collective and computes while it travels."""
    start_all_reduce(scene.breadcrumbs[0], waits=False)
    assert scene.checks(50, scene.beat) == ""


def test_waits_that_end_are_no_hang(scene: Scene) -> None:
    def next_collective() -> None:
        scene.beat()
        for shared_state in scene.breadcrumbs:
            start_all_reduce(shared_state, waits=True)

    assert scene.checks(50, next_collective) == ""


def test_while_no_check_is_made_no_wait_grows(scene: Scene) -> None:
    start_all_reduce(scene.breadcrumbs[0], waits=True)
    state = scene.processes.snapshot()
    assert scene.watch.check(state, 1.0) is None
    assert scene.watch.check(state, 3600.0) is None  # this process was stopped


def test_a_stopped_rank_and_who_waits_for_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    scene.watch.launch = LaunchSpec(start_seconds=3, timeout_seconds=60)
    start_all_reduce(scene.breadcrumbs[0], waits=True)
    scene.processes.states[1] = psutil.STATUS_STOPPED
    while scene.watch.is_healthy(scene.processes):
        scene.beat()
        now[0] += 1.0
    assert scene.watch.hang is not None and scene.watch.hang.error == (
        "its process is stopped (SIGSTOP, or a debugger); it did not join all_reduce #1 (4.0 KiB) "
        "of group tp (ranks 0-1), in which rank 0 waits"
    )


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        ((0, 0), "torchrun, which listens at 127.0.0.1:29500, has not started any rank"),
        ((JOINING, 1), "rank 1 did not connect to the others at 127.0.0.1:29500"),
        ((JOINING, JOINING), "ranks 0-1 cannot reach the others at 127.0.0.1:29500"),
    ],
)
def test_a_start_without_progress(starts: tuple[int, int], words: str) -> None:
    scene = Scene()
    for shared_state, start in zip(scene.breadcrumbs, starts, strict=True):
        shared_state.reach(start, "starting")
    assert scene.checks(3, scene.beat) == ""
    found = scene.checks(1, scene.beat)
    assert found.startswith("None: the start made no progress for 3 s (launch.start_seconds)")
    assert words in found


def test_progress_restarts_the_time_limit_and_building_has_none() -> None:
    scene = Scene(start=1)
    assert scene.checks(3, scene.beat) == ""
    scene.breadcrumbs[0].reach(JOINING, "joining")
    assert scene.checks(3, scene.beat) == ""
    for shared_state in scene.breadcrumbs:
        shared_state.reach(JOINED, "building the model")
    assert scene.checks(50, scene.beat) == ""


@pytest.mark.slow
def test_all_ranks_stopped_end_the_run(data: Path, tmp_path: Path) -> None:
    """With the default time-out of 300 s; nobody is left who could time out."""
    run = endless(data, tmp_path / "run", "--tp", "2").at_step(2)
    for rank in (0, 1):
        run.worker(rank).suspend()
    run.ended()
    assert run.process.returncode == 1 and not run.left_behind(3)
    assert run.summary["failure"]["rank"] == 0
    assert "its process is stopped (SIGSTOP, or a debugger); so is rank 1" in run.stderr


@pytest.mark.slow
def test_a_stopped_torchrun_ends_the_run(data: Path, tmp_path: Path) -> None:
    run = endless(data, tmp_path / "run", "--tp", "2").at_step(2)
    (torchrun,) = psutil.Process(run.process.pid).children()
    torchrun.suspend()
    run.ended()
    assert run.process.returncode == 1 and not run.left_behind(3)
    assert run.summary["failure"]["rank"] is None and "torchrun, which" in run.stderr


@pytest.mark.slow
def test_a_launcher_that_was_stopped_continues(data: Path, tmp_path: Path) -> None:
    """Ctrl-Z for longer than any time limit; its ranks train meanwhile."""
    run = endless(data, tmp_path / "run", "--tp", "2").at_step(2)
    run.process.send_signal(signal.SIGSTOP)
    wait_for(lambda: psutil.Process(run.process.pid).status() == psutil.STATUS_STOPPED)
    before = len(run.records)
    wait_for(lambda: len(run.records) > before + 20)
    run.process.send_signal(signal.SIGCONT)
    run.at_step(len(run.records) + 5)
    for process in run.family.values():  # as Slurm does: torchrun and the ranks take no notice
        process.send_signal(signal.SIGUSR1)
    run.at_step(len(run.records) + 5)
    run.process.send_signal(signal.SIGUSR1)
    assert run.ended().process.returncode == 128 + signal.SIGUSR1
    assert run.summary["checkpoint"] == run.summary["steps"] and not run.left_behind(3)
