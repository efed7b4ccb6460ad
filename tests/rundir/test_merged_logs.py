"""What many ranks printed is in the merged log once, in an order that each rank would accept."""

from __future__ import annotations

import time

from mpctl.rundir.merged_logs import MergedEntry, merge_logs

BEGIN = "rank {} of 4, coordinates {{'tp': {}, 'cp': 0, 'dp': 0, 'pp': 0}}"


def begin(rank: int) -> str:
    return BEGIN.format(rank, rank)


def test_alike_entries_become_one_with_their_ranks_and_what_differs_left_open() -> None:
    merged = merge_logs({rank: [begin(rank), "ready"] for rank in (3, 1, 2, 0)})
    assert merged == [
        MergedEntry("rank … of 4, coordinates {'tp': …, 'cp': 0, 'dp': 0, 'pp': 0}", (0, 1, 2, 3)),
        MergedEntry("ready", (0, 1, 2, 3)),
    ]


def test_a_value_that_is_equal_everywhere_is_shown() -> None:
    (entry,) = merge_logs(
        {0: ["joins 10.0.0.1:29500 in 1.5 s"], 1: ["joins 10.0.0.1:29500 in 2 s"]}
    )
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
        ("0", (0,)), ("1:", (0,)), ("…", (0, 1)), ("1:", (0, 1)), ("2:", (0, 1)),
    ]  # fmt: skip


def test_tracebacks_of_several_ranks_are_one() -> None:
    lines = ["[rank{0}]: Traceback (most recent call last):", "[rank{0}]:   File x",
             "[rank{0}]: RuntimeError: peer 10.0.0.{0}:4000 is gone"]  # fmt: skip
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
