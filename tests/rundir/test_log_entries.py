"""Lines that belong together are one entry; what is a rank's own in it is told from the rest."""

from __future__ import annotations

import pytest

from mpctl.rundir.log_entries import EntrySplitter, Template, split_entries

BEGIN = "rank 0 of 2, coordinates {'tp': 0, 'cp': 0, 'dp': 0, 'pp': 0}"
TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "worker.py", line 3, in run',
    "    trainer.run()",
    "RuntimeError: out of memory",
]


def texts(*lines: str) -> list[str]:
    return [entry.text for entry in split_entries(lines)]


def test_a_traceback_is_one_entry_and_what_follows_another() -> None:
    assert texts("before", *TRACEBACK, "after") == ["before", "\n".join(TRACEBACK), "after"]


def test_torch_names_the_rank_before_each_line_of_a_traceback() -> None:
    assert texts(*(f"[rank12]: {line}" for line in TRACEBACK)) == ["\n".join(TRACEBACK)]


def test_indented_lines_and_closing_brackets_belong_to_the_line_before() -> None:
    assert texts("Model(", "  (norm): Norm()", ")", "", "step 1: loss 5") == [
        "Model(\n  (norm): Norm()\n)",
        "step 1: loss 5",
    ]
    assert texts("  cut off above", "next") == ["  cut off above", "next"]


def test_entries_know_their_attempt_and_step() -> None:
    lines = ["cut off", "step 8: loss 5.0", "slow", BEGIN, "building", "step 9: loss 4.9"]
    sections = [entry.section for entry in split_entries(lines)]
    assert sections == [(0, 0), (0, 8), (0, 8), (1, 0), (1, 0), (1, 9)]


def test_a_growing_log_holds_its_last_entry_back() -> None:
    splitter = EntrySplitter()
    assert list(splitter.feed(["a", *TRACEBACK[:2]])) == [(0, 0, "a")]
    assert list(splitter.feed(TRACEBACK[2:])) == []
    assert [entry.text for entry in splitter.flush()] == ["\n".join(TRACEBACK)]
    assert list(splitter.flush()) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (BEGIN, BEGIN.replace("rank 0", "rank 1").replace("'tp': 0", "'tp': 1")),
        ("[W1122 02:39:50.194 socket.cpp:75] late", "[W1122 02:39:51.2 socket.cpp:75] late"),
        ("E1122 02:39:50.194000 5813 x.py:10] failed", "E1122 02:39:50.195000 99 x.py:10] failed"),
        ("connect to 10.0.0.1:29500 failed", "connect to 10.0.0.2:40001 failed"),
        ("connect to [node-a]:29500", "connect to [node-a]:40001"),
        ("saved in 12.5 s", "saved in 3 s"),
        ("2026-11-22 02:39:50,123 WARNING slow", "2026-11-22T02:40:50.5Z WARNING slow"),
        ("Rank 3: object at 0x7f12ab", "Rank 4: object at 0xdeadbeef"),
        ("process 5823 closing", "process 12 closing"),
        ("on cuda:0", "on cuda:7"),
    ],
)  # fmt: skip
def test_what_is_a_ranks_own_does_not_tell_entries_apart(one: str, other: str) -> None:
    first, second = Template.of(one), Template.of(other)
    assert first.parts == second.parts and first.values != second.values
    assert second.text(second.values) == other


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("step 1: loss 5.25", "step 1: loss 5.26"),
        ("expected 4 tensors", "expected 5 tensors"),
        ("lr 0.001", "lr 0.002"),
        ("layer 3 overflowed", "layer 4 overflowed"),
    ],
)
def test_other_numbers_do(one: str, other: str) -> None:
    assert Template.of(one).parts != Template.of(other).parts
