"""The sentence about a hang: who did not join which collective, and what it does instead."""

from __future__ import annotations

import pytest

from mpctl.launch.verdict import HangEvidence, ProcessView, Verdict, blocked_in, judge
from tests.launch.test_wait_graph import Ranks, tp_and_dp

RUNNING = {rank: ProcessView(processor=1.0) for rank in range(4)}


def verdict(ranks: Ranks, process: ProcessView | None = None, stack: str = "") -> Verdict:
    processes = RUNNING if process is None else {**RUNNING, 3: process}
    judged = judge(HangEvidence(ranks.progress, processes, {3: stack}), 12.3)
    assert judged is not None
    return judged


def test_the_rank_at_the_end_is_named_with_the_collective() -> None:
    judged = verdict(tp_and_dp(), ProcessView("stopped"))
    assert judged.rank == 3
    assert judged.error == (
        "did not join all_reduce #5 (4.0 KiB) of group dp (ranks 1, 3), in which rank 1 has waited "
        "for 12 s: its process is stopped (SIGSTOP, or a debugger)"
    )
    assert blocked_in(tp_and_dp().progress, 3) == (
        "did not join all_reduce #5 (4.0 KiB) of group dp (ranks 1, 3), in which rank 1 waits"
    )
    assert blocked_in(tp_and_dp().progress, 0) == ""


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
    ranks = Ranks().waits(0, "dp 0-2", 5).at(1, "dp 0-2", 4).at(2, "dp 0-2", 4)
    processes = {0: ProcessView(), 1: ProcessView(processor=1.0), 2: ProcessView("zombie")}
    judged = judge(HangEvidence(ranks.progress, processes), 9)
    assert judged is not None and judged.rank == 2


def test_a_message_that_was_not_sent() -> None:
    judged = verdict(Ranks().waits(0, "pp 3,0", 7, "s").at(3, "pp 3,0", 6, kind="s"))
    assert judged.rank == 3 and judged.error.startswith(
        "did not send message #7 (4.0 KiB) of group pp from rank 3 to rank 0, for which rank 0 has "
    )


def test_nobody_waits() -> None:
    """A long computation of all ranks is no hang: a compilation, a first batch, a validation."""
    assert judge(HangEvidence(Ranks().at(0, "dp 0-1", 3).at(1, "dp 0-1", 3).progress), 999) is None


def test_ranks_that_wait_for_each_other() -> None:
    ranks = Ranks().waits(0, "pp 0,1", 3, "s").at(0, "pp 1,0", 2, kind="s")
    ranks.waits(1, "pp 1,0", 3, "s").at(1, "pp 0,1", 2, kind="s")
    judged = verdict(ranks)
    assert judged.rank is None and judged.error.startswith("ranks 0-1 wait for each other: rank 0")


def test_different_collectives_under_one_number() -> None:
    judged = verdict(Ranks().waits(0, "dp 0-1", 3).waits(1, "dp 0-1", 3, "g"))
    assert judged.rank is None and judged.error == (
        "ranks of group dp started different collectives as number 3: rank 1 all_gather of "
        "4.0 KiB, rank 0 all_reduce of 4.0 KiB"
    )


def test_all_wait_in_the_same_collective() -> None:
    judged = verdict(Ranks().waits(0, "dp 0-1", 3).waits(1, "dp 0-1", 3))
    assert judged.rank is None and "the network between their hosts may be cut" in judged.error


def test_one_that_was_stopped_while_it_waited() -> None:
    """It had joined a message of several pieces; its peers wait for the rest of it."""
    ranks = Ranks().waits(0, "dp 0-1", 3).waits(1, "dp 0-1", 3)
    judged = judge(HangEvidence(ranks.progress, {0: ProcessView(), 1: ProcessView("stopped")}), 9)
    assert judged is not None and judged.rank == 1
    assert judged.error.startswith("joined and did not finish all_reduce #3")
    assert judged.error.endswith("its process is stopped (SIGSTOP, or a debugger)")
