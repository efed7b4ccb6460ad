"""Counts, biases and fractions of a step, and their checkpoint."""

from __future__ import annotations

import pytest
import torch

from mpctl.train.layers.routing_log import RoutingLog
from mpctl.train.transport.group import Group
from tests.threads import run_ranks
from tests.train.layers.oracle import grouped, logged

NAMES = ("layers.1.mlp", "layers.3.mlp")


def _ranks(rank: int, size: int) -> list:
    """Two steps of two ranks; each counts in the layer of its stage only."""
    messages: list = []
    world = grouped(rank, size, messages, "world")
    log, results = RoutingLog(NAMES, 3, bias_rate=0.5), []
    for step in range(2):
        log.begin(0.25)
        row = log.row(NAMES[rank])
        row.counts.add_(torch.tensor([5, 1, 3]) if step == 0 else torch.tensor([2, 2, 2]))
        row.near_ties.add_(1 + rank)
        totals = log.end(world)
        log.apply(totals)
        results.append([totals.counts.tolist(), totals.near_ties.tolist(), log.biases()])
    return [results, logged(messages), log.last_counts()]


def test_every_rank_knows_the_biases_of_every_layer() -> None:
    for rank, (steps, messages, last) in enumerate(run_ranks(_ranks, 2)):
        biases = {name: [-0.5, 0.5, 0.0] for name in NAMES}
        ties = [0, 0]
        ties[rank] = 1 + rank
        assert steps == [[[[5, 1, 3]] * 2, ties, biases], [[[2, 2, 2]] * 2, ties, biases]]
        assert messages == [("all_reduce", "world", 2 * 3 * 8, "int64")] * 2
        assert last == {name: [2, 2, 2] for name in NAMES}


def test_counts_beyond_what_float32_holds_decide_exactly() -> None:
    log = RoutingLog(["a"], 2, bias_rate=1.0)
    log.begin(1.0)
    log.row("a").counts.add_(torch.tensor([2**40 + 1, 2**40]))
    log.apply(log.end(Group()))
    assert log.biases() == {"a": [-1.0, 1.0]}


def test_a_skipped_step_leaves_everything_as_it_was() -> None:
    log = RoutingLog(["a"], 2, bias_rate=1.0)
    log.begin(1.0)
    log.row("a").counts.add_(torch.tensor([3, 1]))
    log.end(Group())
    log.begin(1.0)
    assert log.end(Group()).counts.tolist() == [[0, 0]]
    assert log.biases() == {"a": [0.0, 0.0]} and log.last_counts() == {"a": [0, 0]}


def test_fractions_are_those_of_the_last_step_and_of_a_checkpoint() -> None:
    log = RoutingLog(["a"], 4)
    row = log.row("a")
    assert row.fractions.tolist() == [0.25] * 4
    log.begin(1.0)
    row.counts.add_(torch.tensor([4, 0, 2, 2]))
    log.apply(log.end(Group()))
    assert row.fractions.tolist() == [0.5, 0.0, 0.25, 0.25]
    resumed = RoutingLog(["a", "b"], 4)
    assert log.biases() == {}  # a router without biases saves none
    resumed.load({}, log.last_counts())
    assert resumed.row("a").fractions.tolist() == [0.5, 0.0, 0.25, 0.25]
    assert resumed.row("b").fractions.tolist() == [0.25] * 4


def test_biases_go_through_a_checkpoint_bit_for_bit() -> None:
    log, resumed = (RoutingLog(["a"], 3, bias_rate=0.1) for _ in range(2))
    log.load({"a": [0.1, -1e-7, 3.0], "of another stage": [1.0]})
    resumed.load(log.biases())
    assert torch.equal(resumed.row("a").bias, torch.tensor([0.1, -1e-7, 3.0]))


def test_another_number_of_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="a: a state of 2 experts for 3"):
        RoutingLog(["a"], 3).load({"a": [0.0, 1.0]})


def test_rows_without_a_table_are_made_on_demand() -> None:
    log = RoutingLog()
    assert log.row("a", experts=3) is log.row("a")
    with pytest.raises(ValueError, match="b is not among the layers"):
        log.row("b")
