"""Training under explicit pipeline layouts: the curve of one process, and what was planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpctl.plan.search.bound import StepTimeBound
from mpctl.plan.search.cuts import PipelineLayouts
from mpctl.plan.search.evaluate import LayoutEvaluator
from mpctl.plan.search.space import SearchSpace
from mpctl.run.launch.summary import planned_traffic
from mpctl.spec.load import load_job
from tests.train.runtime.test_axes import SHAPES, same_copies
from tests.train.runtime.test_experts import same_gradients
from tests.train.runtime.tiny import column, make_data, tiny_job, tiny_plan, train

SP: dict[str, Any] = {"parallel__sequence_parallel": True}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model__layers": 5},
    "llama": {**SHAPES["llama"], "model__layers": 5},
    "bert": {**SHAPES["bert"], "model__layers": 5},
    "two ahead": {**SHAPES["llama"], "model__layers": 3, "model__mtp_layers": 2},
    "tied ahead": {"model__layers": 3, "model__mtp_layers": 1},
}
UNEVEN = ("Etttt|tL", "E|t*5L", "Et*5|L", "Et|t*4||L", "E||ttt|ttL")
AHEAD = ("Ettt|mL", "Etttm|L", "Ett|tm||L", "E|ttt|m|L", "Ettt||m|L")
CHUNKS = {"parallel__schedule": "interleaved"}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt", "Et|tttt|L", {}),
    ("llama", "E||t|tttt||L", {"parallel__pp": 2, **CHUNKS}),
    ("bert", "Et*5|L", {}),
    ("two ahead", "Ett|tmm|L", {}),
    ("two ahead", "Et|tt|mm|L", {"parallel__pp": 2, **CHUNKS}),
    ("tied ahead", "Ettt|m|L", {}),
]
SLOW = [
    *(("llama", layout, {}) for layout in UNEVEN),
    *(("tied ahead", layout, {}) for layout in AHEAD),
    *(("two ahead", layout.replace("m", "mm"), {}) for layout in AHEAD),
    *(("two ahead", "Et|tt|mm|L", {"parallel__pp": 2, "parallel__zero": zero, "dp": 2}) for zero in (1, 2, 3)),
    ("two ahead", "Ett|tmm|L", {"parallel__schedule": "zero-bubble"}),
    ("two ahead", "Ett|tmm|L", {"parallel__schedule": "gpipe"}),
    ("two ahead", "Ettt|mm|L", {"tp": 2, **SP}),
    ("two ahead", "Etttmm|L", {"tp": 2, **SP, "training__recompute": "selective"}),
    ("gpt", "Et||tttt|L", {"parallel__pp": 2, "training__recompute": "full"}),
]
ALL = [*(pytest.param(*case) for case in CASES), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("layout"))


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory):
    """Trainings of one process, by model."""
    done: dict[str, list[dict[str, Any]]] = {}

    def trained(model: str) -> list[dict[str, Any]]:
        if model not in done:
            done[model] = train(_job(data, model, None, {}), tmp_path_factory.mktemp("one"))
        return done[model]

    return trained


def _job(data: Path, model: str, layout: str | None, how: dict[str, Any]):
    pp = how.get("parallel__pp", layout.count("|") + 1 if layout else 1)
    ranks = how.get("tp", 1) * how.get("dp", 1) * pp
    cut = {"parallel__pipeline_layout": layout} if layout else {}
    common = {"training__dtype": "fp64", "training__steps": 3, "checkpoint__interval": 0, "checkpoint__at_end": False}
    return tiny_job(data, **{**MODELS[model], **cut, **how, **common, "cluster__gpus_per_node": ranks})


@pytest.mark.parametrize(("model", "layout", "how"), ALL)
@pytest.mark.quick(1)
def test_a_layout_changes_nothing_and_the_plan_is_what_runs(
    data: Path, alone, tmp_path: Path, model: str, layout: str, how: dict[str, Any]
) -> None:
    job = _job(data, model, layout, how)
    ranks, one = train(job, tmp_path, timeout=120), alone(model)
    for name in ("loss", "grad_norm"):
        assert column(ranks, name) == pytest.approx(column(one, name), rel=1e-10)
    same_copies(ranks)
    assert same_gradients(ranks, one)
    estimate = tiny_plan(job).estimate
    for rank in ranks:
        stage = rank["coords"]["pp"]
        assert rank["count"] == estimate.memory[stage].parameters
        assert rank["traffic"] == planned_traffic(estimate.messages[stage])
        sent = rank["validation"]
        planned = estimate.validation(stage, rank["coords"]["dp"], sent["samples"])
        assert sent["traffic"] == planned_traffic(planned)


def test_a_layout_that_a_search_proposes_is_trained(data: Path, alone, tmp_path: Path) -> None:
    """A head as long as several layers: 5 layers in uneven chunks of 2 stages."""
    job = _job(data, "gpt", None, {"parallel__pp": 2})
    cluster = load_job(None, {"model": "llama-3-8b", "cluster": "dgx-h100", "cluster.nodes": 1}).cluster
    there = {"cluster": cluster.model_copy(update={"gpus_per_node": 2})}
    there["training"] = job.training.model_copy(update={"dtype": "bf16"})
    evaluator = LayoutEvaluator(SearchSpace(job.model_copy(update=there), {"pp": 2, "recompute": "none"}))
    families = PipelineLayouts(StepTimeBound(evaluator)).families
    texts = {one.pipeline_layout: one.vpp for axes in evaluator.space.axes() for one in families(axes)}
    texts.pop(None, None)
    assert max(texts.values()) > 1
    text = max(texts, key=lambda text: (texts[text], text))
    ranks, one = train(_job(data, "gpt", text, {"parallel__pp": 2, **CHUNKS}), tmp_path, timeout=120), alone("gpt")
    for name in ("loss", "grad_norm"):
        assert column(ranks, name) == pytest.approx(column(one, name), rel=1e-10)
    assert same_gradients(ranks, one)
