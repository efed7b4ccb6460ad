"""The cut by cost: what layers cost, by hand, and no other cut has a faster slowest stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.model.families.t5.ops import ENCODER
from mpctl.model.families.t5.ops import operator_table as t5_table
from mpctl.model.operators.blocks import head, word_table
from mpctl.model.operators.layer import OperatorGroup
from mpctl.model.operators.table import OperatorTable
from mpctl.model.pipeline.balance import LayerCosts, balanced_counts
from mpctl.model.pipeline.costs import job_costs, layer_costs
from mpctl.model.pipeline.stages import UnevenLayersError, job_stages, spans_of
from mpctl.spec.load import parse
from tests.jobs import GPT, job_of, shape_of

COST = {"parallel.stage_balance": "cost"}
TINY: dict[str, Any] = {
    "model.layers": 4,
    "model.hidden": 64,
    "model.heads": 4,
    "model.vocab": 256,
    "model.seq_length": 16,
}
T5 = {"model.family": "t5", "model.position": "relative", "model.decoder_layers": 4, "model.decoder_seq_length": 8}


def test_costs_of_stages_by_hand() -> None:
    costs = LayerCosts([1, 2, 3, 4], entry=5, exit=10)
    assert costs.of_stages([[(0, 1), (2, 3)], [(1, 2), (3, 4)]]) == [9, 16]


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "exit_", "counts"),
    [
        ([2] * 24, 4, 1, 0, [6, 6, 6, 6]),
        ([2] * 24, 4, 1, 7, [7, 7, 7, 3]),  # 55 / 4 is 13.75
        ([2] * 12, 2, 1, 6, [7, 5]),  # 14 and 16: as 16 and 14, but with fewer in front
        ([2] * 30, 4, 1, 6, [8, 8, 8, 6]),  # 66 / 4 is 16.5
        ([2] * 8, 2, 2, 10, [3, 1, 3, 1]),
        ([1, 1, 1, 1, 3, 3], 2, 1, 0, [4, 2]),  # 4 and 6; 7 and 3 with one more
        ([5, 5, 5], 3, 1, 100, [1, 1, 1]),
        ([5, 5, 5], 1, 1, 7, [3]),
    ],
)
def test_balanced_by_hand(layers: list[int], pp: int, vpp: int, exit_: int, counts: list[int]) -> None:
    assert balanced_counts(LayerCosts(layers, exit=exit_), pp=pp, vpp=vpp) == counts


def every_cut(costs: LayerCosts, pp: int, vpp: int) -> Iterator[int]:
    """The slowest stage of each."""
    layers = len(costs.layers)
    for bounds in combinations(range(1, layers), pp * vpp - 1):
        counts = [stop - start for start, stop in pairwise((0, *bounds, layers))]
        yield max(costs.of_stages(spans_of(counts, pp)))


@given(
    runs=st.lists(st.tuples(st.integers(1, 5), st.sampled_from([10, 20, 33])), min_size=1, max_size=3),
    pp=st.integers(2, 4),
    vpp=st.integers(1, 2),
    entry=st.sampled_from([0, 25]),
    exit_=st.sampled_from([0, 35, 80]),
)
def test_no_cut_is_better(runs: list[tuple[int, int]], pp: int, vpp: int, entry: int, exit_: int) -> None:
    """Of equal layers none at all; of others with several chunks, none by much."""
    costs = LayerCosts([cost for count, cost in runs for _ in range(count)], entry, exit_)
    if len(costs.layers) < pp * vpp:
        return
    counts = balanced_counts(costs, pp=pp, vpp=vpp)
    assert min(counts) >= 1 and sum(counts) == len(costs.layers)
    slowest, best = max(costs.of_stages(spans_of(counts, pp))), min(every_cut(costs, pp, vpp))
    is_plain = len({cost for _, cost in runs}) == 1
    assert slowest <= best * (1 if is_plain else 1.2)


# ---------------------------------------------------------------- what layers cost


def test_a_gpt_by_hand() -> None:
    """1024 tokens of the benchmark's model: a layer 6 (12 h^2 + 2 s h), the head 6 v h."""
    shape = {
        "model.layers": 8,
        "model.hidden": 512,
        "model.heads": 8,
        "model.vocab": 32000,
        "model.seq_length": 256,
        "training.micro_batch_size": 4,
    }
    layer, exit_ = 6 * (12 * 512**2 + 2 * 256 * 512), 6 * 32000 * 512
    assert job_costs(job_of(shape)) == LayerCosts([1024 * layer] * 8, 0, 1024 * exit_)
    job = job_of({**shape, **COST, "parallel.pp": 2})
    assert job_stages(job, 8) == [[(0, 6)], [(6, 8)]]  # 122.4e6 against 40.8e6 + 98.3e6 a token


def test_layers_that_are_run_again_cost_a_forward_more_and_the_head_does_not() -> None:
    plain, again = (job_costs(job_of({**TINY, "training.recompute": how})) for how in ("none", "full"))
    assert [3 * cost for cost in again.layers] == [4 * cost for cost in plain.layers]
    assert again.exit == plain.exit


def test_frozen_layers_cost_a_forward() -> None:
    whole = job_costs(job_of(TINY))
    frozen = {**TINY, "training.freeze": ["embedding.*", "layers.[01].*"]}
    costs = job_costs(job_of({**frozen, "training.recompute": "full"}))
    assert [3 * cost for cost in costs.layers[:2]] == [*whole.layers[:2]]
    assert [3 * cost for cost in costs.layers[3:]] == [4 * whole.layers[3]]
    stages = job_stages(job_of({**frozen, **COST, "parallel.pp": 2, "model.vocab": 8}), 4)
    assert stages == [[(0, 3)], [(3, 4)]]


@pytest.mark.parametrize("settings", [TINY, {**TINY, **T5}, {**TINY, "model.family": "bert"}])
def test_costs_are_of_all_ranks_of_tp(settings: dict[str, Any]) -> None:
    """But for what each of them computes alike: BERT's h x h of every token and of the first."""
    one, two = (job_costs(job_of({**settings, "model.vocab_divisor": 1, "parallel.tp": tp})) for tp in (1, 2))
    alike = 6 * (16 * 64 * 64 + 64 * 64 + 64 * 2) if "bert" in settings.values() else 0
    assert two == replace(one, exit=one.exit + alike)


def test_an_end_between_two_stacks_counts_to_the_layer_beside_it() -> None:
    """A T5 whose encoder ended with a head of its own: its last layer takes 6 v h a token more."""
    job = job_of({**TINY, **T5, "model.layers": 2, "model.decoder_layers": 2})
    model = shape_of(job)
    table = t5_table(model, tp=1)
    encoder, decoder = table.stacks
    words = word_table(model, tp=1, name="head")
    extra = OperatorGroup((head(ENCODER, words, tied=False),))
    plain = layer_costs(job, model, table)
    costs = layer_costs(job, model, OperatorTable((replace(encoder, exit=extra), decoder)))
    added = [a - b for a, b in zip(costs.layers, plain.layers, strict=True)]
    assert added == [0, 16 * 6 * 256 * 64, 0, 0]
    assert (plain.entry, plain.exit) == (0, 8 * 6 * 256 * 64)
    assert (costs.entry, costs.exit) == (plain.entry, plain.exit)


# ---------------------------------------------------------------- of a job


@pytest.mark.parametrize("family", ["gpt", "llama", "bert", "glm", "t5"])
@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (3, 1), (4, 2)])
def test_any_number_of_layers_goes_on_any_number_of_stages(family: str, pp: int, vpp: int) -> None:
    shapes: dict[str, dict[str, Any]] = {
        "llama": {"model.position": "rotary", "model.norm": "rmsnorm", "model.activation": "swiglu"},
        "t5": {**T5, "model.decoder_layers": 6},
        "gpt": {},
    }
    shape = shapes.get(family, {"model.family": family})
    settings = {**TINY, "model.layers": 13, **shape, **COST, "parallel.pp": pp, "parallel.vpp": vpp}
    job = job_of(settings)
    layers = shape_of(job).all_layers
    stages = job_stages(job, layers)
    path = [layer for chunk in zip(*stages, strict=True) for span in chunk for layer in range(*span)]
    assert path == list(range(layers))
    assert all(start < stop for spans in stages for start, stop in spans)
    assert stages == job_stages(parse(job.model_dump(mode="json")), layers)  # as a worker finds it


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parallel.pp": 8, "parallel.vpp": 2}, "12 layers cannot fill 8 stages x 2 chunks"),
        ({"parallel.pp": 2, "parallel.first_stage_layers": 7}, "balanced by cost, and the layers"),
        ({"parallel.pp": 2, "parallel.loss_is_layer": True}, "balanced by cost, and the layers"),
    ],
)
def test_what_cannot_be_balanced_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnevenLayersError, match=message):
        job_stages(job_of({**GPT, **COST, **settings}), 12)


def test_a_thousand_layers_are_cut_into_hundreds_of_chunks() -> None:
    """143 stages of 3 chunks: 2.3 layers a chunk on average, and no stage far from its share."""
    costs = LayerCosts([100] * 1000, entry=5, exit=480)
    stages = costs.of_stages(spans_of(balanced_counts(costs, pp=143, vpp=3), 143))
    assert sum(stages) == 100_485
    assert max(stages) <= 800  # the share is 703
