"""Exchange through shared memory when a rank leaves, lags or does something else."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mpctl.transport import shared
from mpctl.transport.shared import NoSegment
from tests import ranks
from tests.ranks import run_ranks
from tests.transport.shared_ranks import all_full, sharing


def ended(function: Callable[..., Any], n: int, *args: Any) -> list[tuple[int | None, str]]:
    """Like run_ranks, but a rank that fails does not end the others: exit code and traceback of
    each; what still runs 10 s later is killed."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        started = [
            ranks.CONTEXT.Process(
                target=ranks._rank, args=(function, rank, n, args, folder, 30, ranks.join_gloo)
            )
            for rank in range(n)
        ]
        for process in started:
            process.start()
        started[0].join(10)
        for process in started:
            process.kill()
            process.join()
        words = [Path(folder, f"{rank}.txt") for rank in range(n)]
        told = [file.read_text() if file.exists() else "" for file in words]
        return [(process.exitcode, text) for process, text in zip(started, told, strict=True)]


def _leaves(rank: int, size: int, number: int) -> None:
    group = sharing(rank, size, timeout=1)
    group.all_reduce(torch.ones(2))
    if rank == 1:
        os.kill(os.getpid(), number)
    group.all_reduce(torch.ones(2))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, r"PeerLost: tp operation 2 \(all_reduce of 8 bytes\): "
                         r"connection closed by peer: rank 1 ended"),
        (signal.SIGSTOP, r"PeerLost: tp operation 2 \(all_reduce of 8 bytes\): timed out "
                         r"after 1 s of waiting for rank 1 "),
    ],
)  # fmt: skip
def test_a_rank_that_waits_in_vain_says_for_whom(number: int, words: str) -> None:
    (code, told), _ = ended(_leaves, 2, number)
    assert code == 1 and re.search(words, told), told


def _posts_and_leaves(rank: int, size: int) -> None:
    group = sharing(rank, size)
    pending = group.start_all_reduce(torch.ones(2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while not group.shared.segment.lost():
        pass
    assert pending.wait().tolist() == [2.0, 2.0]


def test_what_a_rank_posted_before_its_end_still_counts() -> None:
    (code, told), _ = ended(_posts_and_leaves, 2)
    assert code == 1 and "AssertionError" not in told  # gloo's last barrier misses rank 1


def _starts_and_leaves(rank: int, size: int) -> None:
    group = sharing(rank, size)
    pending = group.start_all_reduce(torch.ones(9000))  # 36,000 bytes, of which slots hold 16,384
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    pending.wait()


def test_a_rank_that_leaves_amid_a_message_is_named() -> None:
    (code, told), _ = ended(_starts_and_leaves, 2)
    assert code == 1
    where = "tp operation 1 (all_reduce of 4096 bytes)"
    assert f"{where}: connection closed by peer: rank 1 ended" in told


def _differ(rank: int, size: int) -> str:
    group = sharing(rank, size)
    try:
        group.all_reduce(torch.ones(2)) if rank == 0 else group.all_gather(torch.ones(3), 0)
    except RuntimeError as error:
        return str(error)
    return "silently wrong"


def test_ranks_that_do_different_things_are_told() -> None:
    first, second = run_ranks(_differ, 2)
    assert "tp operation 1 (all_reduce of 8 bytes): rank 1 came with all_gather of 12" in first
    assert "tp operation 1 (all_gather of 12 bytes): rank 0 came with all_reduce of 8" in second


def _nowhere(path: str, name: str, size: int) -> None:
    raise OSError(f"{path} is not here")


def _refused(rank: int, size: int, failing: int) -> str:
    if failing == 0:
        layout: dict[str, Any] = {"reserve": all_full}
    else:
        layout = {}
        shared._map = _nowhere if rank == failing else shared._map
    try:
        sharing(rank, size, **layout)
    except NoSegment as error:
        return str(error)
    return "shared"


def test_all_ranks_share_or_none_does() -> None:
    told = run_ranks(_refused, 3, 0)
    assert "no space left" in told[0]
    assert told[1:] == ["the first rank of the group could not make it"] * 2
    told = run_ranks(_refused, 3, 2)
    assert told[:2] == ["another rank of the group could not map it"] * 2
    assert "is not here" in told[2]


def _traces(rank: int, size: int) -> list:
    group = sharing(rank, size)
    group.all_reduce(torch.ones(2))
    links = list(Path("/proc/self/fd").iterdir())  # the listing's own handle is closed by now
    open_files = [str(link.readlink()) for link in links if link.is_symlink()]
    lines = Path("/proc/self/maps").read_text().splitlines()
    kept = [file for file in open_files if "memfd" in file or "pidfd" in file]
    return [kept, [line.split(maxsplit=5)[-1] for line in lines if "mpctl-" in line]]


def test_the_memory_has_no_name() -> None:
    """So whoever is killed leaves nothing behind. Open are the mapping's own handle (Python keeps
    one) and one on the peer's process."""
    for kept, mapped in run_ranks(_traces, 2):
        assert len(mapped) == 1 and re.fullmatch(r"/memfd:mpctl-\w{16} \(deleted\)", mapped[0])
        assert sorted(kept) == [mapped[0], "anon_inode:[pidfd]"]


def _elsewhere(rank: int, size: int) -> str:
    """The path leads to another file, as it may on another host."""
    kept = shared._name
    shared._name = (lambda number: "mpctl-other") if rank == 1 else kept
    try:
        sharing(rank, size)
    except NoSegment as error:
        return str(error)
    return "shared"


def test_another_file_at_the_same_place_is_not_opened() -> None:
    told = run_ranks(_elsewhere, 2)
    assert told[0] == "another rank of the group could not map it"
    assert "not mpctl-other: not the same host?" in told[1]


@pytest.mark.parametrize(("system", "machine"), [("linux", "aarch64"), ("darwin", "x86_64")])
def test_other_machines_go_by_gloo(
    system: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(OSError, match=f"this is {system} on {machine}"):
        shared._make(4096, all_full)
