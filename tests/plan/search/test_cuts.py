"""Explicit pipeline layouts that a search proposes: where they pay, legal, and what other software reads."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.interop.megatron_flags import pipeline_layout
from mpctl.model.pipeline.balance import counts_beside, stage_costs
from mpctl.plan.planning.plan import load_plan
from mpctl.plan.search.bound import StepTimeBound
from mpctl.plan.search.cuts import WORTH, ItemCosts, PipelineLayouts, _usual_chunks
from mpctl.plan.search.evaluate import LayoutEvaluator
from mpctl.plan.search.find import find_layouts
from mpctl.plan.search.space import SearchSpace
from mpctl.spec.job import JobSpec
from mpctl.spec.layout_text import parse_layout, shortest
from mpctl.spec.load import load_job

LLAMA = {"model": "llama-3-8b", "cluster": "dgx-h100", "cluster.nodes": 2, "training.runtime": "megatron-core"}
FIXED: dict[str, Any] = {"tp": 1, "cp": 1, "pp": 4, "micro_batch_size": 1, "recompute": "none", "zero": 1}
DEEP = {  # 13 layers, the first one dense, and one that predicts further
    **LLAMA,
    "model.layers": 13,
    "model.ffn": 4096,
    "model.experts": 8,
    "model.experts_per_token": 2,
    "model.expert_ffn": 2048,
    "model.dense_layers": 1,
    "model.mtp_layers": 1,
}


def job_of(settings: dict[str, Any], **more: Any) -> JobSpec:
    return load_job(None, {**settings, "training.global_batch_size": 64, **more})


def proposed(job: JobSpec, **sizes: int) -> list[Any]:
    """The families with a layout over axes of these sizes."""
    evaluator = LayoutEvaluator(SearchSpace(job, {**FIXED, **sizes, "sequence_parallel": sizes.get("tp", 1) > 1}))
    families = PipelineLayouts(StepTimeBound(evaluator)).families
    return [one for axes in evaluator.space.axes() for one in families(axes) if one.pipeline_layout]


def test_a_head_as_long_as_several_layers_has_fewer_beside_it() -> None:
    """32 layers on 4 stages, a head as long as 2.4: 9 layers in the slowest of them, where 8 and the head take 10.4."""
    job = job_of(LLAMA)
    found = find_layouts(SearchSpace(job, FIXED), top=1).groups[0].first
    even = find_layouts(SearchSpace(job, {**FIXED, "stage_balance": "even"}), top=1).groups[0].first
    assert even.layout.pipeline_layout is None
    layout = parse_layout(found.layout.pipeline_layout)
    stages = [sum(part.layers for part in layout.parts[stage::4]) for stage in range(4)]
    assert not layout.problems and layout.layers == 32
    assert max(stages) == 9 and stages[3] < 8
    assert found.seconds < 0.95 * even.seconds
    plan = load_plan(None, {**LLAMA, "training.global_batch_size": 64, **job_settings(found.layout)})
    assert plan.fits and not plan.errors
    assert plan.estimate.time.total == pytest.approx(found.step_seconds, rel=1e-9)
    assert plan.estimate.fullest_stage.device_bytes == found.bytes
    assert pipeline_layout(plan.job) == shortest(found.layout.pipeline_layout)


def job_settings(layout: Any) -> dict[str, Any]:
    names = ("tp", "cp", "pp", "vpp", "zero", "pipeline_layout", "order", "zero_size")
    return {f"parallel.{name}": getattr(layout, name) for name in names}


def test_layers_that_divide_no_way_are_cut_into_chunks() -> None:
    """13 layers on 4 stages: no setting gives 2 chunks each, and a layout does."""
    job = job_of({**DEEP, "model.mtp_layers": 0})
    layouts = {one.vpp: parse_layout(one.pipeline_layout) for one in proposed(job, ep=1, etp=1)}
    assert {*layouts} >= {2}
    assert all(not layout.problems and layout.layers == 13 for layout in layouts.values())
    assert {part.layers for part in layouts[2].parts[1:-1]} <= {1, 2}


@pytest.mark.parametrize("predictions", [1, 2])
def test_prediction_runs_apart_where_the_end_of_the_model_is_the_slowest_stage(predictions: int) -> None:
    """On 8 stages of 1.6 layers loss and prediction are two stages; bounds hold for them too."""
    job = job_of({**DEEP, "model.mtp_layers": predictions})
    families = proposed(job, pp=8, ep=1, etp=1)
    assert families
    layouts = [parse_layout(one.pipeline_layout) for one in families]
    assert all(not layout.problems and layout.predictions == predictions for layout in layouts)
    assert any(layout.separates_prediction for layout in layouts)
    evaluator = LayoutEvaluator(SearchSpace(job, FIXED))
    bound = StepTimeBound(evaluator)
    for family in families:
        layout = family._replace(zero=1, order="tp-cp-dp-pp")
        assert evaluator.is_legal(layout)
        ((least, _),) = bound.of_members(family, bound.of_family(family), [layout])
        assert least <= evaluator.step_seconds(layout)
        assert evaluator.min_bytes(layout, 1) <= evaluator.device_bytes(layout)


@pytest.mark.parametrize(
    ("more", "fixed"),
    [
        ({"training.runtime": "megatron-2022"}, {}),  # whose releases know no layout
        ({"training.runtime": "other"}, {}),  # of which nobody knows
        ({}, {"stage_balance": "even"}),
        ({"model.vocab": 4096}, {}),  # even stages are as long
    ],
)
def test_no_layout_is_proposed_where_it_cannot_be_said_or_does_not_pay(
    more: dict[str, Any], fixed: dict[str, Any]
) -> None:
    evaluator = LayoutEvaluator(SearchSpace(job_of({**LLAMA, **more}), {**FIXED, "sequence_parallel": False, **fixed}))
    families = PipelineLayouts(StepTimeBound(evaluator)).families
    found = [family for axes in evaluator.space.axes() for family in families(axes)]
    assert found and not any(family.pipeline_layout for family in found)


def test_a_layout_that_is_fixed_stays() -> None:
    text = "Et*9|t*9|t*8|t*6L"
    found = find_layouts(SearchSpace(job_of(LLAMA), {**FIXED, "pipeline_layout": text}), top=2)
    assert {point.layout.pipeline_layout for point in found.evaluated} == {text}
    assert {point.layout.vpp for point in found.evaluated} == {1}


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("apart", [False, True])
def test_no_stage_could_give_a_layer_to_a_shorter_one(pp: int, vpp: int, apart: bool) -> None:
    """Equal layers: moving one from the slowest stage to any other makes none faster."""
    costs = ItemCosts((16,) * 40, 3, 20 * apart, 37)
    items = costs.items(pp * vpp, apart=apart)
    counts = counts_beside(costs.layers, items, pp=pp, closed=int(apart))
    assert sum(counts) == 40 and min(counts[1 : -1 - apart], default=1) >= 1 and (not apart or counts[-1] == 0)
    stages = stage_costs(costs.layers, items, counts, pp)
    slowest = stages.index(max(stages))
    movable = any(counts[at] > int(not items[at]) for at in range(slowest, pp * vpp, pp))
    takers = {part % pp for part in range(pp * vpp - apart)}
    assert not movable or all(stages[taker] + 16 >= stages[slowest] for taker in takers - {slowest})


def test_chunks_hold_some_2_to_4_layers() -> None:
    assert [_usual_chunks(61, pp) for pp in (2, 4, 8, 16, 32)] == [[8, 16], [4, 8], [2, 4], [2], []]
    assert 0 < WORTH < 0.04
