"""Words of torch's NCCL backend in the logs of ranks.

The lines are those that torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp writes; the first form is
of torch 2.5, the second of torch 2.7 and later. Numbers and descriptions are ours.
"""

from __future__ import annotations

import pytest

from mpctl.launch.nccl_log import NcclTimeout, judge_nccl_logs, watchdog_timeouts
from mpctl.runtime.process import is_echo

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
    judged = judge_nccl_logs({**logs, 3: "step 3: loss 2.0\n"})
    assert judged is not None and judged.rank == 3
    assert judged.error == (
        "did not join ALLREDUCE #5 of group dp (ranks 1, 3), in which rank 1 waited until NCCL's "
        "watchdog ended the wait"
    )


def test_a_member_that_started_less_than_the_others() -> None:
    """All four time out, rank 1 in a collective of another group."""
    logs = {rank: log(rank, "default_pg", 5, 5) for rank in (0, 2, 3)}
    judged = judge_nccl_logs({**logs, 1: log(1, "default_pg", 4, 4) + log(1, "tp 0-1", 9, 9)})
    assert judged is not None
    assert judged.rank == 0 and "group tp (ranks 0-1), in which rank 1 waited" in judged.error


def test_logs_that_name_nobody() -> None:
    assert judge_nccl_logs({0: "", 1: ""}) is None
    assert judge_nccl_logs({0: log(0, "", 5, 5), 1: ""}) is None
    everyone = {rank: log(rank, "tp 0-1", 5, 5) for rank in range(2)}
    assert judge_nccl_logs(everyone) is None


@pytest.mark.parametrize(
    "words",
    [
        "ncclRemoteError: A call failed possibly due to a network error or a remote process "
        "exiting prematurely.",
        "NCCL error in: ProcessGroupNCCL.cpp:3356, remote process exited or there was a network "
        "error, NCCL version 2.26.2",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or "
        "device error. It can be also caused by unexpected exit of a remote peer, you can check "
        "NCCL warnings for failure reason and see if there is connection closure by a peer.",
        "NCCL WARN socketProgress: Connection closed by remote peer n2<47388>",
    ],
)
def test_words_about_a_lost_peer_are_echoes(words: str) -> None:
    assert is_echo(RuntimeError(words))


def test_a_link_of_two_stages_is_a_group_of_its_own() -> None:
    """Messages of both directions count apart (runtime/stage_links.py)."""
    judged = judge_nccl_logs(
        {0: log(0, "pp backward 1,0", 3, 3), 1: log(1, "pp forward 0-1", 9, 9)}
    )
    assert judged is not None and judged.rank == 1
    assert judged.error.startswith("did not join ALLREDUCE #3 of group pp backward (ranks 0-1)")
