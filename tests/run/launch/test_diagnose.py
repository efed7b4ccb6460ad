"""Which rank is blamed, by the files and exit codes that a failed attempt leaves.

One failure of 512 ranks is told once: who failed first, and how many lost their peers.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpctl.records.rundir.breadcrumb import BreadcrumbState
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.rank_files import FailureRecord
from mpctl.records.rundir.summary import Failure, OtherFailure
from mpctl.render.run import print_failure
from mpctl.run.launch.attempt import LAUNCHER_ABSENT, AttemptPhase, AttemptState, NodeState, RankState
from mpctl.run.launch.diagnose import LONGEST_LINE, AttemptEvidence, find_failure, other_failures
from mpctl.run.launch.verdict import Verdict
from mpctl.spec.load import load_job
from mpctl.train.runtime.process import failure_record
from mpctl.train.runtime.step_guard import StepRefused
from mpctl.train.transport.exchange import PeerLost
from tests.run.launch.attempts import new_breadcrumb, state_of

WATCHDOG = "[rank0]:[E321 ProcessGroupNCCL.cpp:607] Watchdog caught collective operation timeout: "


class Attempt:
    """A failed attempt of pp 2, dp 2: ranks 0 and 1 are the first stage."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder)
        self.run.torchrun_log.parent.mkdir(parents=True)
        self.shared_states: dict[int, BreadcrumbState] = {}
        self.records: dict[int, FailureRecord] = {}
        self.codes: dict[int, int] = {}
        self.terminated: list[int] = []
        self.job = load_job(None, {"parallel.pp": 2, "parallel.dp": 2, "cluster.gpus_per_node": 4})

    def raised(self, rank: int, error: BaseException) -> None:
        coords = {"dp": rank % 2, "pp": rank // 2}
        self.records[rank] = failure_record(error, rank=rank, coords=coords, doing="step 3")

    def ended(self, codes: dict[int, int], *, terminated: bool = True) -> None:
        """As torchrun reports ranks that did not end with code 0. terminated: it sent those of code
        -15 the signal."""
        self.codes = codes
        self.terminated = [rank for rank, code in codes.items() if terminated and code == -15]

    def waits(self, rank: int, group: str, members: tuple[int, ...]) -> None:
        """The rank has started a collective of the group and waits for its end."""
        shared_state = new_breadcrumb()
        log = shared_state.collectives.group(group, members)
        assert log is not None
        log.wait(log.start("all_reduce", 4096))
        self.shared_states[rank] = state_of(shared_state)

    def started(self, rank: int) -> None:
        """The rank has written its first words."""
        self.shared_states[rank] = state_of(new_breadcrumb())

    def log(self, rank: int, text: str) -> None:
        self.run.log(rank).write_text(text)

    def node(self, ranks: range = range(4), **seen: Any) -> NodeState:
        said = {
            "ranks": {rank: RankState("", 0.0, self.shared_states.get(rank, BreadcrumbState())) for rank in ranks},
            "exit_codes": self.codes,
            "terminated": self.terminated,
            "failures": [self.records[rank] for rank in ranks if rank in self.records],
        }
        return NodeState(**{"host": "n1", "code": 1, **said, **seen})

    def failure(self, *, memory_kills: int = 0, **seen: Any) -> Failure:
        code = seen.get("code", 1)
        node = self.node(code=code, killed_by=max(0, -(code or 0)), memory_kills=memory_kills)
        return self.failure_of(node, **seen)

    def failure_of(self, *nodes: NodeState, **seen: Any) -> Failure:
        phase = {0: AttemptPhase.SUCCEEDED, None: AttemptPhase.ENDED}
        seen["phase"] = phase.get(seen.pop("code", 1), AttemptPhase.FAILED)
        evidence = AttemptEvidence(**{"state": AttemptState(nodes), **seen})
        return find_failure(self.run, self.job, evidence)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path)


LOST = PeerLost("Connection closed by peer [127.0.0.1]:4711")


def test_a_rank_of_a_grid_is_named_by_its_place_in_it(attempt: Attempt) -> None:
    attempt.job = load_job(None, {"parallel.tp": 4, "parallel.tensor_mode": "2d", "training.micro_batch_size": 2})
    attempt.raised(0, LOST)
    attempt.raised(3, LOST)
    attempt.ended({0: 1, 3: 1, 1: -15})
    failure = attempt.failure()
    assert failure.coords == {"tp": 2, "col": 0, "row": 1, "cp": 0, "dp": 0, "pp": 0}


def test_a_rank_that_left_with_exit_code_0_is_blamed(attempt: Attempt) -> None:
    """Its peers lost it: two record that, and torchrun terminated the third, without a record."""
    attempt.raised(0, LOST)
    attempt.raised(3, LOST)
    attempt.ended({0: 1, 3: 1, 1: -15})
    failure = attempt.failure()
    assert failure.rank == 2 and failure.coords["pp"] == 1
    assert failure.error == "exited with code 0 before the last step"


class ProgramAttempt(Attempt):
    """As Attempt, of a program."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        launch = self.job.launch.model_copy(update={"program": ["python", "train.py"]})
        self.job = self.job.model_copy(update={"launch": launch})

    def left(self, rank: int, doing: str, *, after: float = -1.0) -> None:
        """The rank has ended with exit code 0. after: seconds after this moment."""
        shared_state = new_breadcrumb()
        shared_state.end(doing)
        self.shared_states[rank] = replace(state_of(shared_state), text_time=time.time() + after)


@pytest.fixture
def program(tmp_path: Path) -> ProgramAttempt:
    return ProgramAttempt(tmp_path)


def test_a_rank_of_a_program_that_left_before_others_lost_it_is_named(program: ProgramAttempt) -> None:
    """Rank 1 left at step 15, rank 3 a moment later; rank 0 lost it, torchrun terminated rank 2."""
    program.left(1, "step 15", after=-2.0)
    program.left(3, "step 16", after=-1.0)
    program.raised(0, LOST)
    program.ended({0: 1, 2: -15})
    failure = program.failure()
    assert (failure.rank, failure.doing) == (1, "step 15")
    assert failure.error == "ended with exit code 0, before the others"
    assert [other.ranks for other in failure.others] == [(0,)] and not failure.would_repeat


def test_a_rank_that_ended_well_after_a_failure_is_not_named(program: ProgramAttempt) -> None:
    program.raised(0, LOST)
    program.left(1, "step 60", after=5.0)
    program.ended({0: 1, 2: 3, 3: -15})
    assert program.failure().rank == 2
    program.ended({0: 1, 2: -15, 3: -15})
    assert program.failure().rank != 1


@pytest.mark.parametrize(("code", "words"), [(3, "exited with code 3"), (-9, "killed by signal 9")])
def test_a_shell_s_rank_that_failed_first_is_named(program: ProgramAttempt, code: int, words: str) -> None:
    """It leaves no record, and neither do the others, whose logs say that they lost a peer."""
    program.log(0, "RuntimeError: [...gloo/pair.cc:553] Connection closed by peer [::1]:4711\n")
    program.log(2, "step 15\n")
    program.ended({0: 1, 2: code, 1: -15, 3: -15})
    failure = program.failure()
    assert failure.rank == 2 and words in failure.error


def test_a_shell_s_rank_that_left_with_exit_code_0_is_named(program: ProgramAttempt) -> None:
    program.log(0, "RuntimeError: [...gloo/pair.cc:553] Connection closed by peer [::1]:4711\n")
    program.ended({0: 1, 1: -15, 3: -15})
    failure = program.failure()
    assert (failure.rank, failure.error) == (2, "ended with exit code 0, before the others")


def test_a_hang_says_who_had_ended_before(program: ProgramAttempt) -> None:
    program.left(2, "step 15")
    hang = Verdict(0, "no heartbeat and no processor time used for 10 s")
    failure = program.failure(code=None, hang=hang)
    assert failure.rank == 0
    assert failure.error.endswith("; rank 2 had ended with exit code 0 at step 15")


def test_a_finished_rank_of_mpctl_is_never_named(attempt: Attempt) -> None:
    """It has done all steps, which those that still save have to do too."""
    shared_state = new_breadcrumb()
    shared_state.end()
    attempt.shared_states[1] = state_of(shared_state)
    attempt.raised(0, LOST)
    attempt.ended({0: 1, 2: -9, 3: -15})
    assert attempt.failure().rank == 2


def test_of_a_long_line_its_end_is_shown(attempt: Attempt) -> None:
    attempt.log(0, "first\n" + "x" * 10**6 + " the end\n")
    attempt.ended({0: 3, 1: -15, 2: -15, 3: -15})
    (line,) = attempt.failure().last_lines
    assert len(line) == LONGEST_LINE and line.endswith("x the end")


def test_all_ranks_that_left_with_exit_code_0(attempt: Attempt) -> None:
    failure = attempt.failure(code=0)
    assert failure.rank == 0 and "exited with code 0 before the last step" in failure.error


def test_nccl_words_of_a_lost_peer_are_secondary_failures(attempt: Attempt) -> None:
    attempt.raised(
        0,
        RuntimeError(
            "ncclSystemError: ... It can be also caused by unexpected exit "
            "of a remote peer, see if there is connection closure by a "
            "peer."
        ),
    )
    attempt.raised(
        1,
        RuntimeError(
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
        ),
    )
    attempt.ended({0: 1, 1: 1, 2: -11, 3: -15})
    failure = attempt.failure()
    assert failure.rank == 2 and "killed by signal 11 (SIGSEGV)" in failure.error


def test_a_rank_that_nccl_aborted_for_waiting_is_not_the_cause(attempt: Attempt) -> None:
    """Ranks 0, 1 and 3 waited for rank 2, which computes for ever; torchrun terminates it."""
    for rank in (0, 1, 3):
        attempt.log(rank, f"step 2: loss 3.1\n{WATCHDOG} WorkNCCL(SeqNum=8)\n")
    attempt.ended({0: -6, 1: -6, 3: -6, 2: -15})
    failure = attempt.failure()
    assert failure.rank == 2 and "did not answer its peers" in failure.error


def test_who_timed_out_waits_for_one_that_waits_itself(attempt: Attempt) -> None:
    """Rank 0 gave up first, and torchrun ended the others: 1 waited for 3, and 3 for nobody."""
    attempt.waits(0, "dp", (0, 1))
    attempt.waits(1, "pp", (1, 3))
    attempt.waits(2, "dp", (2, 3))
    attempt.raised(0, PeerLost("timed out after 20 s of waiting for rank 1"))
    attempt.ended({0: 1, 1: -15, 2: -15, 3: -15})
    failure = attempt.failure()
    assert (failure.rank, failure.would_repeat) == (3, False)
    assert failure.error == (
        "did not join all_reduce #1 (4.0 KiB) of group pp (ranks 1, 3), in which rank 1 waits; the others timed out"
    )


def test_a_rank_that_crashed_is_named_with_its_collective(attempt: Attempt) -> None:
    attempt.waits(0, "dp", (0, 1))
    attempt.raised(0, LOST)
    attempt.ended({0: 1, 1: -11, 2: -15, 3: -15})
    failure = attempt.failure()
    assert (failure.rank, failure.would_repeat) == (1, True)
    assert failure.error == (
        "killed by signal 11 (SIGSEGV); it did not join all_reduce #1 (4.0 KiB) of group dp "
        "(ranks 0-1), in which rank 0 waits"
    )


def test_watchdog_messages_replace_a_missing_collective_log(attempt: Attempt) -> None:
    words = (
        "[PG ID 1 PG GUID 5(dp 2-3) Rank 0]  failure detected by watchdog at work sequence id: 8 "
        "PG status: last enqueued work: 8, last completed work: 7"
    )
    for rank in (0, 1, 2):
        attempt.log(rank, f"{WATCHDOG} WorkNCCL(SeqNum=8, OpType=ALLREDUCE\n{words if rank else ''}")
    attempt.log(1, WATCHDOG)
    attempt.ended({0: -6, 1: -6, 2: -6, 3: -15})
    failure = attempt.failure()
    assert failure.rank == 3 and "did not join collective #8 of group dp (ranks 2-3)" in (failure.error)


def test_a_recorded_error_would_repeat_and_may_ask_for_a_rollback(attempt: Attempt) -> None:
    attempt.raised(0, ValueError("token 60000"))
    assert (attempt.failure().would_repeat, attempt.failure().rollback) == (True, None)
    attempt.raised(0, StepRefused("the loss spikes", is_secondary=False, rollback=17))
    assert attempt.failure().rollback == 17


def test_an_abort_without_the_watchdog_is_a_cause(attempt: Attempt) -> None:
    attempt.log(0, WATCHDOG)
    attempt.log(3, "terminate called after throwing an instance of 'std::bad_alloc'\n")
    attempt.ended({0: -6, 3: -6, 1: -15, 2: -15})
    failure = attempt.failure()
    assert failure.rank == 3 and "killed by signal 6 (SIGABRT)" in failure.error


def test_when_all_ranks_timed_out_the_first_is_reported(attempt: Attempt) -> None:
    for rank in range(4):
        attempt.log(rank, WATCHDOG)
    attempt.ended(dict.fromkeys(range(4), -6))
    assert "timed out waiting for its peers" in attempt.failure().error


def test_what_the_supervisor_saw_comes_after_errors_and_before_silence(attempt: Attempt) -> None:
    seen = {"code": None, "hang": Verdict(1, "its process is stopped")}
    assert (attempt.failure(**seen).rank, attempt.failure(**seen).doing) == (1, "step 1")
    nobody = attempt.failure(code=None, hang=Verdict(None, "torchrun is stopped"))
    assert (nobody.rank, str(nobody)) == (None, f"torchrun is stopped ({nobody.log})")
    assert attempt.failure(stopped=(2, 3)).error.endswith("so is rank 3")
    attempt.raised(3, ValueError("token 60000"))
    assert attempt.failure(**seen).rank == 3


def test_memory_that_ran_out_is_reported(attempt: Attempt) -> None:
    assert "torchrun ended before its ranks" in attempt.failure().error
    attempt.ended({})
    killed = attempt.failure(code=-9, memory_kills=1).error
    assert killed.startswith("torchrun, before its ranks had started, was killed by signal 9 (")
    assert "(SIGKILL: memory ran out" in killed
    assert "often sent by the kernel" in attempt.failure(code=-9).error
    attempt.started(2)
    assert attempt.failure(code=-15).error == ("torchrun, with its ranks, was killed by signal 15 (SIGTERM)")
    attempt.ended({1: -9, 0: -15, 2: -15, 3: -15})
    failure = attempt.failure(memory_kills=1)
    assert failure.rank == 1 and "memory ran out" in failure.error
    assert "torchrun" not in failure.error


def test_a_rank_that_something_else_terminated_is_named_by_the_signal(attempt: Attempt) -> None:
    """Schedulers send SIGTERM. torchrun reports which ranks it terminated itself."""
    attempt.raised(0, LOST)
    attempt.ended({0: 1, 2: -15}, terminated=False)
    failure = attempt.failure()
    assert (failure.rank, failure.would_repeat) == (2, False)
    assert failure.error == "killed by signal 15 (SIGTERM)"


def test_a_torchrun_that_was_killed_on_another_host_is_named(attempt: Attempt) -> None:
    """Its ranks die with it and leave nothing; those of the other host lose them."""
    attempt.raised(0, LOST)
    attempt.raised(1, LOST)
    attempt.started(2)
    attempt.ended({0: 1, 1: 1})
    first = attempt.node(range(2))
    second = attempt.node(range(2, 4), node=1, host="n2", code=-9, killed_by=9, exit_codes={}, terminated=())
    failure = attempt.failure_of(first, second)
    assert failure.rank is None and not failure.would_repeat
    assert failure.error == (
        "torchrun on host n2, with its ranks, was killed by signal 9 (SIGKILL, often sent by the "
        "kernel when memory runs out)"
    )
    assert failure.others[0].ranks == (0, 1)


def test_a_lost_host_ends_a_run_where_its_ranks_were(attempt: Attempt) -> None:
    lost = NodeState(node=1, host="n2", lost="it has not answered for 20 s")
    assert attempt.failure_of(attempt.node(range(2)), lost).doing == "start"
    attempt.shared_states[1] = BreadcrumbState("step 15, forward of micro batch 2")
    failure = attempt.failure_of(attempt.node(range(2)), lost)
    assert (failure.rank, failure.doing) == (None, "step 15, forward of micro batch 2")


def test_ranks_that_the_launcher_ended_did_not_exit_by_themselves(attempt: Attempt) -> None:
    """Rank 0 timed out; the second host's ranks waited on, until the launcher killed torchrun."""
    attempt.raised(0, LOST)
    attempt.ended({0: 1, 1: -15})
    first = attempt.node(range(2))
    second = attempt.node(range(2, 4), node=1, host="n2", code=-9, exit_codes={}, terminated=())
    failure = attempt.failure_of(first, second, code=None)
    assert failure.error == "did not answer its peers, which timed out waiting for it"


def test_a_failure_is_json_and_words(attempt: Attempt) -> None:
    attempt.raised(3, ValueError("token 60000"))
    assert attempt.records[3]["is_echo"] is False
    expected = "rank 3 (dp 1, pp 1) failed at step 3: ValueError: token 60000"
    assert str(attempt.failure()) == expected


def failed(rank: int, error: str, *, is_echo: bool = False) -> FailureRecord:
    return {
        "rank": rank,
        "coords": {"tp": rank % 2},
        "doing": "step 3",
        "error": error,
        "is_echo": is_echo,
        "time": 100.0 + rank,
        "traceback": [],
    }  # type: ignore[typeddict-item]


def state(records: list[FailureRecord], **codes: int) -> AttemptState:
    exit_codes = {int(rank.removeprefix("rank_")): code for rank, code in codes.items()}
    terminated = [rank for rank, code in exit_codes.items() if code == -15]
    node = NodeState(failures=records, exit_codes=exit_codes, terminated=terminated)
    return AttemptState([node])


LOST_PEER = "RuntimeError: Connection closed by peer [10.0.0.{}]:29500"


def test_secondary_failures_are_one_number() -> None:
    records = [failed(rank, LOST_PEER.format(rank), is_echo=True) for rank in range(512) if rank != 7]
    (secondary,) = other_failures(state([failed(7, "ValueError: bad token"), *records]), 7)
    assert secondary == OtherFailure(
        (*range(7), *range(8, 512)), "RuntimeError: Connection closed by peer […]:29500", is_echo=True
    )
    assert str(secondary).startswith("511 ranks lost their peers (ranks 0-6, 8-511): RuntimeError")


def test_other_causes_come_before_secondary_failures() -> None:
    records = [
        failed(0, LOST_PEER.format(0), is_echo=True),
        failed(1, "ValueError: rank 1 has a bad token"),
        failed(2, "ValueError: rank 2 has a bad token"),
    ]
    others = other_failures(state(records, rank_3=-9, rank_4=-15, rank_5=1, rank_0=1), 5)
    assert [str(other) for other in others] == [
        "ranks 1-2: ValueError: rank … has a bad token",
        "rank 3: killed by signal 9",
        "1 rank lost its peer (rank 0): RuntimeError: Connection closed by peer [10.0.0.0]:29500",
    ]


def test_nothing_else_failed() -> None:
    assert other_failures(state([failed(1, "ValueError")], rank_1=1, rank_0=-15), 1) == ()
    assert other_failures(AttemptState(), None) == ()


def test_an_error_without_words() -> None:
    (other,) = other_failures(state([failed(1, "", is_echo=True)]), None)
    assert str(other) == "1 rank lost its peer (rank 1): an error without words"


@pytest.mark.parametrize("columns", [80, 120])
def test_the_first_failure_is_on_top(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    others = (OtherFailure(tuple(range(1, 512)), "Connection closed by peer", is_echo=True),)
    failure = Failure(
        rank=0,
        coords={"tp": 0, "dp": 3},
        error="ValueError: token \x1b[2J60000",
        doing="step 3, forward",
        log="runs/demo/logs/rank-0.log",
        last_lines=("Traceback ...", "ValueError"),
        host="n2",
        others=others,
    )
    print_failure(failure, run="runs/demo", step=2)
    assert capsys.readouterr().err.splitlines() == [
        "✗ rank 0 on host n2 (tp 0, dp 3) failed at step 3, forward: ValueError: token [2J60000",
        "  │ Traceback ...",
        "  │ ValueError",
        "  and 511 ranks lost their peers (ranks 1-511): Connection closed by peer",
        "  → full log: runs/demo/logs/rank-0.log",
        "  → go on from step 2: mpctl launch --resume --run-dir runs/demo",
    ]


# ---------------------------------------------------------------- which host is blamed


def on_two_hosts(attempt: Attempt, **seen: Any) -> Failure:
    """Ranks 0 and 1 on n1, 2 and 3 on n2; `seen` is of both hosts."""
    return attempt.failure_of(
        attempt.node(range(2), host="n1", node=0, **seen), attempt.node(range(2, 4), host="n2", node=1, **seen)
    )


@pytest.mark.parametrize(
    ("codes", "blamed"),
    [
        ({3: -9}, "n2"),
        ({3: -11, 2: -9}, "n2"),
        ({3: -9, 0: -9}, ""),  # on both hosts
        ({3: 1}, ""),  # an exit code is the program's
        ({3: -9, 0: -15}, "n2"),  # torchrun ended rank 0
    ],
)
def test_a_host_is_blamed_for_its_killed_ranks(attempt: Attempt, codes: dict[int, int], blamed: str) -> None:
    for rank in range(4):
        attempt.started(rank)
    attempt.ended(codes)
    assert on_two_hosts(attempt).blamed == blamed


def test_a_host_is_not_blamed_for_a_rank_that_needed_too_much_memory(attempt: Attempt) -> None:
    attempt.ended({3: -9})
    assert on_two_hosts(attempt, memory_kills=1).blamed == ""


@pytest.mark.parametrize(
    ("error", "blamed"),
    [
        (ValueError("token 60000"), ""),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "n2"),
        (OSError(5, "Input/output error"), "n2"),
        (RuntimeError("CUDA error: device-side assert triggered"), ""),
        (LOST, ""),
    ],
)
def test_a_host_is_blamed_for_its_device_and_its_disk(attempt: Attempt, error: Exception, blamed: str) -> None:
    attempt.raised(2, error)
    attempt.raised(0, LOST)
    attempt.ended({0: 1, 1: 1, 2: 1, 3: 1})
    assert on_two_hosts(attempt).blamed == blamed


def test_no_host_is_blamed_for_what_all_ranks_raise(attempt: Attempt) -> None:
    for rank in range(4):
        attempt.raised(rank, OSError(5, "Input/output error"))
    attempt.ended(dict.fromkeys(range(4), 1))
    assert on_two_hosts(attempt).blamed == ""


def test_a_host_that_is_lost_alone_is_blamed(attempt: Attempt) -> None:
    n1, n2 = attempt.node(range(2), host="n1", code=None), attempt.node(range(2, 4), host="n2")
    silent = replace(n2, lost="it has not answered for 20 s", code=None)
    assert attempt.failure_of(n1, silent, code=None).blamed == "n2"
    gone = replace(n1, lost="it has not answered for 20 s")
    assert attempt.failure_of(gone, silent, code=None).blamed == ""


def test_no_host_is_blamed_for_a_launcher_that_was_stopped(attempt: Attempt) -> None:
    n1, n2 = attempt.node(range(2), host="n1", code=None), attempt.node(range(2, 4), host="n2")
    why = f"{LAUNCHER_ABSENT} for 30 s, and hosts end their ranks after 20 s without it"
    failure = attempt.failure_of(n1, replace(n2, lost=why, code=None), code=None)
    assert (failure.blamed, failure.error) == ("", why)


def test_the_host_of_a_stopped_or_hung_rank_is_blamed(attempt: Attempt) -> None:
    hosts = [attempt.node(range(2), host="n1", code=None), attempt.node(range(2, 4), host="n2", code=None)]
    assert attempt.failure_of(*hosts, code=None, stopped=(3,)).blamed == "n2"
    assert attempt.failure_of(*hosts, code=None, stopped=(0, 3)).blamed == ""
    assert attempt.failure_of(*hosts, code=None, hang=Verdict(0, "it computes")).blamed == "n1"
    assert attempt.failure_of(*hosts, code=None, hang=Verdict(None, "a circle")).blamed == ""


def test_a_host_is_blamed_for_its_killed_torchrun(attempt: Attempt) -> None:
    n1 = attempt.node(range(2), host="n1", code=0)
    n2 = attempt.node(range(2, 4), host="n2", code=-9, killed_by=9)
    assert attempt.failure_of(n1, n2).blamed == "n2"
    assert attempt.failure_of(replace(n1, killed_by=9), n2).blamed == ""
