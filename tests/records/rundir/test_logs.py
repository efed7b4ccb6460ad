"""Lines that belong together are one entry; values of a rank are separated from the rest.

What many ranks printed is in the merged log once, in an order that each rank would accept.
"""

from __future__ import annotations

import time

import pytest

from mpctl.records.rundir.logs import EntrySplitter, MergedEntry, Template, merge_logs, split_entries

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
)
def test_values_of_a_rank_do_not_distinguish_entries(one: str, other: str) -> None:
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


BEGIN_OF = "rank {} of 4, coordinates {{'tp': {}, 'cp': 0, 'dp': 0, 'pp': 0}}"


def begin(rank: int) -> str:
    return BEGIN_OF.format(rank, rank)


def test_alike_entries_become_one_with_their_ranks_and_what_differs_left_open() -> None:
    merged = merge_logs({rank: [begin(rank), "ready"] for rank in (3, 1, 2, 0)})
    assert merged == [
        MergedEntry("rank … of 4, coordinates {'tp': …, 'cp': 0, 'dp': 0, 'pp': 0}", (0, 1, 2, 3)),
        MergedEntry("ready", (0, 1, 2, 3)),
    ]


def test_a_value_that_is_equal_everywhere_is_shown() -> None:
    (entry,) = merge_logs({0: ["joins 10.0.0.1:29500 in 1.5 s"], 1: ["joins 10.0.0.1:29500 in 2 s"]})
    assert entry.text == "joins 10.0.0.1:29500 in … s"


def test_repeats_are_counted_within_a_step() -> None:
    lines = ["slow disk", "slow disk", "step 1: loss 5", "slow disk"]
    merged = merge_logs({0: lines, 1: lines[:2]})
    assert [(e.text, e.ranks, e.repeats) for e in merged] == [
        ("slow disk", (0, 1), 2),
        ("step 1: loss 5", (0,), 1),
        ("slow disk", (0,), 1),
    ]


def test_steps_order_what_ranks_printed() -> None:
    ahead = ["step 1: loss 5", "step 2: loss 4", "step 3: loss 3"]
    behind = ["step 1: loss 5", "waiting"]
    merged = merge_logs({0: ahead, 1: behind})
    assert [e.text for e in merged] == ["step 1: loss 5", "waiting", *ahead[1:]]


def test_each_rank_finds_its_own_order() -> None:
    logs = {0: ["a", "b", "c"], 1: ["a", "x", "b"], 2: ["a", "y", "c"], 3: ["z"]}
    merged = [e.text for e in merge_logs(logs)]
    assert merged == ["z", "a", "x", "y", "b", "c"]
    for lines in logs.values():
        assert [text for text in merged if text in lines] == lines


def test_attempts_are_counted_from_the_end() -> None:
    """A log that is cut at its beginning shows the same last attempt as one that is not."""
    whole = [begin(0), "step 1: loss 5", begin(0), "step 1: loss 5", "step 2: loss 4"]
    merged = merge_logs({0: whole, 1: [begin(1), *whole[3:]]})
    assert [(e.text.split()[1], e.ranks) for e in merged] == [
        ("0", (0,)),
        ("1:", (0,)),
        ("…", (0, 1)),
        ("1:", (0, 1)),
        ("2:", (0, 1)),
    ]


def test_tracebacks_of_several_ranks_are_one() -> None:
    lines = [
        "[rank{0}]: Traceback (most recent call last):",
        "[rank{0}]:   File x",
        "[rank{0}]: RuntimeError: peer 10.0.0.{0}:4000 is gone",
    ]
    (entry,) = merge_logs({rank: [line.format(rank) for line in lines] for rank in (1, 2)})
    assert entry.ranks == (1, 2) and entry.lines[-1] == "RuntimeError: peer …:4000 is gone"


def test_nothing_is_merged_from_nothing() -> None:
    assert merge_logs({}) == [] and merge_logs({0: [], 1: [""]}) == []


def test_a_thousand_ranks_are_merged_in_seconds() -> None:
    steps = [f"step {step}: loss {5 - step / 50:.3f}" for step in range(1, 101)]
    logs = {rank: [begin(rank), *steps, f"warning {rank % 7}"] for rank in range(1000)}
    began = time.process_time()
    merged = merge_logs(logs)
    assert time.process_time() - began < 10
    assert len(merged) == 108 and sum(len(e.ranks) for e in merged) == 102_000
