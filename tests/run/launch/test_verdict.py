"""The sentence about a hang: who did not join which collective, and what it does instead; who waits
for whom, from what ranks have logged; words of torch's NCCL backend in the logs of ranks.

These are the lines that torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp writes, in the form of
torch 2.5 and that of torch 2.7 and later, with numbers and descriptions of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from mpctl.records.rundir.collective_log import CollectiveProgress, GroupProgress
from mpctl.run.launch.verdict import (
    NcclTimeout,
    ProcessView,
    Verdict,
    WaitGraph,
    hang_verdict,
    nccl_verdict,
    watchdog_timeouts,
)
from mpctl.train.runtime.process import is_secondary_failure

RUNNING = {rank: ProcessView(processor=1.0) for rank in range(4)}


def verdict(ranks: Ranks, process: ProcessView | None = None, stack: str = "") -> Verdict:
    """The verdict after 12.3 s on ranks that compute, except rank 3 if `process` is not None."""
    processes = RUNNING if process is None else {**RUNNING, 3: process}
    found = hang_verdict(WaitGraph(ranks.progress), processes, {3: stack}, 12.3)
    assert found is not None
    return found


def test_the_rank_at_the_end_is_named_with_the_collective() -> None:
    found = verdict(tp_and_dp(), ProcessView("stopped"))
    assert found.rank == 3
    assert found.error == (
        "did not join all_reduce #5 (4.0 KiB) of group dp (ranks 1, 3), in which rank 1 has waited "
        "for 12 s: its process is stopped (SIGSTOP, or a debugger)"
    )
    assert WaitGraph(tp_and_dp().progress).missed_by(3) == (
        "did not join all_reduce #5 (4.0 KiB) of group dp (ranks 1, 3), in which rank 1 waits"
    )
    assert WaitGraph(tp_and_dp().progress).missed_by(0) == ""


@pytest.mark.parametrize(
    ("process", "words"),
    [
        (ProcessView("stopped"), "its process is stopped"),
        (ProcessView("zombie"), "its process has ended"),
        (ProcessView(""), "its process has ended"),
        (ProcessView("running", processor=0.9), "it computes; it is at mpctl/x.py:7 in f"),
        (ProcessView("sleeping"), "it neither computes nor waits in a collective; it is at mpctl"),
        (ProcessView("disk-sleep"), "(state D: a disk, a network file system or a driver"),
        (
            ProcessView("disk-sleep", faults_a_second=900, swapped_bytes=2_000_000_000),
            "its memory is being read back from disk (900 major page faults a second, 1.9 GiB of "
            "it in swap space): the host is short of memory; it is at mpctl/x.py:7 in f",
        ),
    ],
)
def test_what_it_does_instead(process: ProcessView, words: str) -> None:
    assert words in verdict(tp_and_dp(), process, "mpctl/x.py:7 in f").error


def test_a_rank_that_has_ended_is_named_before_one_that_computes() -> None:
    ranks = Ranks().waits(0, "dp 0-3", 5).at(1, "dp 0-3", 4).at(3, "dp 0-3", 4)
    assert verdict(ranks, ProcessView("zombie")).rank == 3


def test_a_message_that_was_not_sent() -> None:
    found = verdict(Ranks().waits(0, "pp 3,0", 7, "s").at(3, "pp 3,0", 6, kind="s"))
    assert found.rank == 3 and found.error.startswith(
        "did not send message #7 (4.0 KiB) of group pp from rank 3 to rank 0, for which rank 0 has "
    )


def test_nobody_waits() -> None:
    """A long computation of all ranks is no hang: a compilation, a first batch, a validation."""
    ranks = Ranks().at(0, "dp 0-1", 3).at(1, "dp 0-1", 3)
    assert hang_verdict(WaitGraph(ranks.progress), RUNNING, {}, 999) is None


def test_ranks_that_wait_for_each_other() -> None:
    """Both stages send first and receive then, and no message is buffered."""
    ranks = Ranks().waits(0, "pp 0,1", 3, "s").at(0, "pp 1,0", 2, kind="s")
    ranks.waits(1, "pp 1,0", 3, "s").at(1, "pp 0,1", 2, kind="s")
    graph = WaitGraph(ranks.progress)
    assert graph.ends == [] and [wait.rank for wait in graph.circle()] == [0, 1]
    found = verdict(ranks)
    assert found.rank is None and found.error.startswith("ranks 0-1 wait for each other: rank 0")


def test_different_collectives_under_one_number() -> None:
    ranks = Ranks().waits(0, "dp 0-1", 3).waits(1, "dp 0-1", 3, "g")
    graph = WaitGraph(ranks.progress)
    assert graph.ends == [] and graph.circle() == [] and graph.waits[0][0].blockers == ()
    found = verdict(ranks)
    assert found.rank is None and found.error == (
        "ranks of group dp started different collectives as number 3: rank 1 all_gather of "
        "4.0 KiB, rank 0 all_reduce of 4.0 KiB"
    )


def test_all_wait_in_the_same_collective() -> None:
    found = verdict(Ranks().waits(0, "dp 0-1", 3).waits(1, "dp 0-1", 3))
    assert found.rank is None and "the network between their hosts may be cut" in found.error


def test_one_that_was_stopped_while_it_waited() -> None:
    """It had joined a message of several pieces; its peers wait for the rest of it."""
    found = verdict(Ranks().waits(0, "dp 0,3", 3).waits(3, "dp 0,3", 3), ProcessView("stopped"))
    assert found.rank == 3
    assert found.error.startswith("joined and did not finish all_reduce #3")
    assert found.error.endswith("its process is stopped (SIGSTOP, or a debugger)")


LETTERS = {"r": "all_reduce", "g": "all_gather", "s": "send"}


@dataclass
class Ranks:
    """Builds the collective logs of ranks: `at(rank, "tp 2-3", 7)` has started and finished 7 of
    the group, `waits` has started it and waits for its end."""

    states: dict[int, list[GroupProgress]] = field(default_factory=dict)
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)

    def at(self, rank: int, group: str, number: int, *, finished: int | None = None, kind: str = "r") -> Ranks:
        name, members = group.split()
        done = number if finished is None else finished
        progress = GroupProgress(name, members, number, done, LETTERS[kind], 4096)
        self.states.setdefault(rank, []).append(progress)
        return self

    def waits(self, rank: int, group: str, number: int, kind: str = "r") -> Ranks:
        self.at(rank, group, number, finished=number - 1, kind=kind)
        self.waiting[rank] = (len(self.states[rank]) - 1, number)
        return self

    @property
    def progress(self) -> dict[int, CollectiveProgress]:
        return {
            rank: CollectiveProgress(tuple(groups), *self.waiting.get(rank, (None, 0)))
            for rank, groups in self.states.items()
        }


def tp_and_dp(*, stopped: int = 3) -> Ranks:
    """The example of the module: all wait because of rank 3."""
    ranks = Ranks()
    ranks.waits(0, "tp 0-1", 9).at(0, "dp 0,2", 4)
    ranks.waits(1, "dp 1,3", 5).at(1, "tp 0-1", 8)
    ranks.waits(2, "tp 2-3", 9).at(2, "dp 0,2", 4)
    return ranks.at(stopped, "tp 2-3", 8).at(stopped, "dp 1,3", 4)


def test_the_example_of_the_module() -> None:
    graph = WaitGraph(tp_and_dp().progress)
    assert graph.ends == [3] and graph.circle() == []
    assert [(wait.rank, wait.group.name) for wait in graph.waits_for(3)] == [(1, "dp"), (2, "tp")]
    assert graph.waits[0][0].blockers == (1,)


def test_a_rank_without_a_log_has_started_nothing() -> None:
    ranks = Ranks().waits(0, "tp 0-1", 1)
    assert WaitGraph(ranks.progress).ends == [1]


def test_ranks_that_compute_wait_for_nobody() -> None:
    ranks = Ranks().at(0, "dp 0-1", 8, finished=6).at(1, "dp 0-1", 6)
    assert WaitGraph(ranks.progress).waits == {}


def test_who_has_joined_and_does_something_else_holds_up_the_rest() -> None:
    """Through shared memory a rank serves its peers only while it waits."""
    ranks = Ranks().waits(0, "dp 0-1", 8).at(1, "dp 0-1", 9, finished=7)
    graph = WaitGraph(ranks.progress)
    assert graph.ends == [1] and graph.waits[0][0].have_started


def test_on_gpus_the_host_only_queues() -> None:
    """Rank 0 has queued two collectives that rank 1 has not; no host waits in either."""
    ranks = Ranks().at(0, "tp 0-1", 9).at(1, "tp 0-1", 7)
    assert WaitGraph(ranks.progress).waits == {}
    assert WaitGraph(ranks.progress, queued=True).ends == [1]


def test_ten_thousand_ranks_take_a_moment() -> None:
    ranks = Ranks()
    for rank in range(9_999):
        ranks.waits(rank, "world 0-9999", 5)
    assert WaitGraph(ranks.at(9_999, "world 0-9999", 4).progress).ends == [9_999]


TIMEOUT = (
    "[rank{rank}]:[E810 03:04:10.866714819 ProcessGroupNCCL.cpp:683] [Rank {rank}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum={number}, OpType=ALLREDUCE, NumelIn=80, "
    "NumelOut=80, Timeout(ms)=600000) ran for 600027 milliseconds before timing out.\n"
)
OLD = (
    "[rank{rank}]:[E321 02:07:08.465150152 ProcessGroupNCCL.cpp:1664] [PG 1 Rank 0] Exception "
    "(either an error or timeout) detected by watchdog at work: {number}, last enqueued NCCL work: "
    "{enqueued}, last completed NCCL work: 77.\n"
)
NEW = (
    "[rank{rank}]:[E810 03:04:11.063313477 ProcessGroupNCCL.cpp:2241] [PG ID 1 PG GUID 5({group}) "
    "Rank 0]  failure detected by watchdog at work sequence id: {number} PG status: last enqueued "
    "work: {enqueued}, last completed work: 77\n"
)


def log(rank: int, group: str, number: int, enqueued: int, form: str = NEW) -> str:
    words = {"rank": rank, "group": group, "number": number, "enqueued": enqueued}
    return "step 3: loss 2.0\n" + TIMEOUT.format(**words) + form.format(**words)


@pytest.mark.parametrize(("form", "group"), [(NEW, "tp 2-3"), (OLD, "")])
def test_both_forms_are_read(form: str, group: str) -> None:
    timeouts = list(watchdog_timeouts(log(2, "tp 2-3", 78, 79, form)))
    assert timeouts == [NcclTimeout(group, 78, "ALLREDUCE", 79)]
    assert list(watchdog_timeouts("step 3: loss 2.0\n")) == []


def test_who_did_not_time_out_is_at_fault() -> None:
    logs = {0: log(0, "dp 0,2", 5, 5), 1: log(1, "dp 1,3", 5, 5), 2: log(2, "tp 2-3", 78, 79)}
    found = nccl_verdict({**logs, 3: "step 3: loss 2.0\n"})
    assert found is not None and found.rank == 3
    assert found.error == (
        "did not join ALLREDUCE #5 of group dp (ranks 1, 3), in which rank 1 waited until NCCL's "
        "watchdog ended the wait"
    )


def test_a_member_that_started_less_than_the_others() -> None:
    """All four time out, rank 1 in a collective of another group."""
    logs = {rank: log(rank, "default_pg", 5, 5) for rank in (0, 2, 3)}
    found = nccl_verdict({**logs, 1: log(1, "default_pg", 4, 4) + log(1, "tp 0-1", 9, 9)})
    assert found is not None
    assert found.rank == 0 and "group tp (ranks 0-1), in which rank 1 waited" in found.error


def test_logs_that_name_nobody() -> None:
    assert nccl_verdict({0: "", 1: ""}) is None
    assert nccl_verdict({0: log(0, "", 5, 5), 1: ""}) is None
    everyone = {rank: log(rank, "tp 0-1", 5, 5) for rank in range(2)}
    assert nccl_verdict(everyone) is None


@pytest.mark.parametrize(
    "words",
    [
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "NCCL error in: ProcessGroupNCCL.cpp:3356, remote process exited or there was a network "
        "error, NCCL version 2.26.2",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or "
        "device error. It can be also caused by unexpected exit of a remote peer, you can check "
        "NCCL warnings for failure reason and see if there is connection closure by a peer.",
        "NCCL WARN socketProgress: Connection closed by remote peer n2<47388>",
    ],
)
def test_words_about_a_lost_peer_are_secondary_failures(words: str) -> None:
    assert is_secondary_failure(RuntimeError(words))


def test_a_link_of_two_stages_is_a_separate_group() -> None:
    """Messages of both directions count apart (train/runtime/p2p.py)."""
    found = nccl_verdict({0: log(0, "pp backward 1,0", 3, 3), 1: log(1, "pp forward 0-1", 9, 9)})
    assert found is not None and found.rank == 1
    assert found.error.startswith("did not join ALLREDUCE #3 of group pp backward (ranks 0-1)")
