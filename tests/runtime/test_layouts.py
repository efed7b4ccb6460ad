"""The layout changes who computes what, never what is computed; and what is sent is as planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mpctl.launch.summary import planned_traffic
from tests.runtime.tiny import STEPS, column, tiny_job, tiny_plan, train, whole_weights

ALL = [(2, 1), (1, 2), (2, 2), (4, 1)]
SAME_FP32, SAME_FP64 = 1e-5, 1e-10  # relative; 6e-8 and 2e-16 were measured


def slow_but(*fast: tuple[int, int]) -> list[object]:
    """All layouts, of which `make test` runs the fast ones."""
    return [pytest.param(*one, marks=() if one in fast else pytest.mark.slow) for one in ALL]


LAYOUTS, IN_FLOAT64 = slow_but((2, 2)), slow_but((2, 2))


def test_training_learns_and_has_dropout(runs) -> None:
    losses = column(runs.get())
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.5
    job = tiny_job(runs.data, training__dropout=0.0, training__steps=1, launch__device="cpu")
    dry = train(job, runs.root / "no-dropout")
    assert column(dry)[0] != pytest.approx(losses[0], rel=SAME_FP32)


@pytest.mark.parametrize(("tp", "dp"), LAYOUTS)
def test_every_layout_has_the_loss_of_one_process(runs, tp: int, dp: int) -> None:
    one, many = runs.get(), runs.get(tp, dp)
    assert column(many) == pytest.approx(column(one), rel=SAME_FP32)
    assert column(many, "grad_norm") == pytest.approx(column(one, "grad_norm"), rel=SAME_FP32)
    last = [ranks[0]["records"][-1]["validation_loss"] for ranks in (one, many)]
    assert last[1] == pytest.approx(last[0], rel=SAME_FP32)


@pytest.mark.parametrize(("tp", "dp"), IN_FLOAT64)
def test_in_float64_even_the_parameters_are_the_same(runs, tp: int, dp: int) -> None:
    one, many = runs.get(dtype="fp64"), runs.get(tp, dp, "fp64")
    assert column(many) == pytest.approx(column(one), rel=SAME_FP64)
    expected, found = whole_weights(one), whole_weights(many)
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=SAME_FP64, atol=1e-12, msg=name)


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_replicas_stay_equal_to_the_bit(runs, dtype: str) -> None:
    first, second = (whole_weights(runs.get(2, 2, dtype), replica) for replica in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_all_ranks_know_the_same_loss(runs) -> None:
    curves = [[record["loss"] for record in rank["records"]] for rank in runs.get(2, 2)]
    assert all(curve == curves[0] for curve in curves)


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), *LAYOUTS])
def test_every_rank_holds_and_sends_what_the_plan_says(runs, tp: int, dp: int) -> None:
    estimate = tiny_plan(tiny_job(runs.data, tp, dp)).estimate
    for rank in runs.get(tp, dp):
        assert rank["count"] == estimate.memory[0].parameters
        assert rank["traffic"] == planned_traffic(estimate.messages[0])
    assert (tp * dp == 1) == (rank["traffic"] == {})


def test_a_batch_of_another_split_is_the_same_batch(runs, tmp_path: Path) -> None:
    job = tiny_job(runs.data, training__micro_batch_size=8, training__steps=5)
    few = column(train(job, tmp_path))
    # the schedule's end differs with the steps, so only what precedes it can be equal
    assert few[:4] == pytest.approx(column(runs.get())[:4], rel=SAME_FP32)
