"""The collective log of a rank: it can be read, also after a kill, and costs little."""

from __future__ import annotations

import time

import pytest

from mpctl.core.collectives import Kind
from mpctl.records.rundir.collective_log import (
    GROUP_TEXT,
    LOG_BYTES,
    MAX_GROUPS,
    CollectiveLog,
    CollectiveProgress,
    GroupProgress,
    parse_rank_ranges,
    rank_ranges,
    read_collectives,
)

REDUCE: Kind = "all_reduce"


class File:
    """A log in memory, and its content for a reader."""

    def __init__(self) -> None:
        self.content = bytearray(LOG_BYTES)
        self.log = CollectiveLog(memoryview(self.content))

    @property
    def progress(self) -> CollectiveProgress:
        return read_collectives(bytes(self.content))


def test_the_example_of_the_module() -> None:
    file = File()
    tp, dp = file.log.group("tp", (2, 3)), file.log.group("dp", range(0, 4, 2))
    assert tp is not None and dp is not None
    for _ in range(5):
        dp.finish(dp.start("all_gather", 64))
    for _ in range(6):
        tp.finish(tp.start(REDUCE, 4096))
    tp.wait(tp.start(REDUCE, 8192))
    assert file.log.words[0] == 449
    progress = file.progress
    assert progress.groups == (
        GroupProgress("tp", "2-3", 7, 6, "all_reduce", 8192),
        GroupProgress("dp", "0,2", 5, 5, "all_gather", 64),
    )
    assert progress.waits_in is progress.groups[0] and progress.number == 7
    assert progress.groups[0].ranks == range(2, 4) and progress.groups[1].ranks == (0, 2)
    tp.finish(7)
    assert file.progress.waits_in is None and file.progress.groups[0].finished == 7


def test_a_later_result_means_that_the_earlier_ones_came_too() -> None:
    file = File()
    dp = file.log.group("dp", (0, 1))
    assert dp is not None
    first, second = dp.start(REDUCE, 8), dp.start(REDUCE, 8)
    dp.finish(second)
    dp.finish(first)
    assert file.progress.groups[0].finished == 2


def test_a_message_between_two_ranks_is_a_group_of_two() -> None:
    file = File()
    pp = file.log.group("pp", (1, 5, 9))
    assert pp is not None
    channel = pp.channel(2, 1)
    assert channel is not None and channel is pp.channel(2, 1)
    channel.start("send", 100)
    assert file.progress.groups[1] == GroupProgress("pp", "9,5", 1, 0, "send", 100)


def test_groups_that_have_no_room_are_not_logged() -> None:
    log = File().log
    assert log.group("pp", [3 * n + n % 3 for n in range(GROUP_TEXT)]) is None
    made = [log.group("tp", (n, n + 1)) for n in range(MAX_GROUPS)]
    assert all(made) and log.group("tp", (90, 91)) is None
    assert log.group("tp", (0, 1)) is made[0]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((0,), "0"),
        ((2, 3), "2-3"),
        ((2, 9), "2,9"),
        ((9, 2), "9,2"),
        (range(0, 16, 4), "0-12/4"),
        ((0, 4, 8, 12, 13, 14), "0-12/4,13-14"),
        (range(1_000_000), "0-999999"),
    ],
)
def test_ranks_in_a_few_characters(ranks: tuple[int, ...] | range, text: str) -> None:
    assert rank_ranges(ranks) == text
    assert list(parse_rank_ranges(text)) == list(ranks)


def test_damaged_files_are_read_as_empty() -> None:
    file = File()
    file.log.group("tp", (0, 1))
    for damage in (b"tp x-y", b"tp 0-99999999999", b"tp \xff"):
        content = bytearray(file.content)
        content[40 : 40 + len(damage)] = damage
        assert read_collectives(bytes(content)) == CollectiveProgress()
    assert read_collectives(bytes(file.content)[:-1]) == CollectiveProgress()
    file.log.words[0] = 64 * 5 + 7
    assert file.progress.waiting is None and len(file.progress.groups) == 1
    with pytest.raises(ValueError, match="ranks in"):
        parse_rank_ranges("0-999999999")


def test_logging_a_collective_takes_microseconds() -> None:
    """Least of several measurements, on a machine that does much else; about 1 us on a quiet one,
    where the smallest exchange of two ranks takes 20."""
    group = File().log.group("tp", (0, 1))
    assert group is not None
    least = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(1000):
            number = group.start(REDUCE, 4096)
            group.wait(number)
            group.finish(number)
        least = min(least, time.perf_counter() - began)
    assert least / 1000 < 10e-6
