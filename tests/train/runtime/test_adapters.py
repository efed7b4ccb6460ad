"""Training by adapters: one curve, and exactly the planned messages and parameters, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mpctl.run.launch.summary import planned_traffic
from mpctl.spec.job import JobSpec
from tests.train.runtime.test_axes import SHAPES
from tests.train.runtime.test_experts import DEEPSEEK, MOE, same_gradients
from tests.train.runtime.tiny import column, tiny_job, tiny_plan, train

LORA = {"rank": 4, "dropout": 0.1}
SP, FULL = {"parallel__sequence_parallel": True}, {"training__recompute": "full"}
DRY = {"training__dropout": 0.0, "training__attention_dropout": 0.0}
PP2 = {"parallel__pp": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2-sp-full": {"tp": 2, **SP, **FULL},
    "tp2-full-dry": {"tp": 2, **FULL, **DRY},
    "tp4-sp": {"tp": 4, **SP},
    "pp2": PP2,
    "zero-bubble-tp2-sp": {"tp": 2, **SP, **PP2, "parallel__schedule": "zero-bubble"},
    "cp2-full": {"parallel__cp": 2, **FULL},
    "tp2-sp-cp2": {"tp": 2, **SP, "parallel__cp": 2},
    "dp2-zero1": {"dp": 2, "parallel__zero": 1},
    "dp2-zero2": {"dp": 2, "parallel__zero": 2},
    "dp2-zero3": {"dp": 2, "parallel__zero": 3},
    "tp2-sp-dp2-zero3-full": {"tp": 2, "dp": 2, "parallel__zero": 3, **SP, **FULL},
}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2-full": {"dp": 2, "parallel__ep": 2, **FULL},
    "tp2-sp-ep2": {"tp": 2, "parallel__ep": 2, **SP},
    "etp2": {"dp": 2, "parallel__etp": 2},
    "tp2-sp-dp2-ep2-etp2-full": {"tp": 2, "dp": 2, "parallel__ep": 2, "parallel__etp": 2, **SP, **FULL},
    "pp2-dp2-ep2-zero-bubble": {"dp": 2, "parallel__ep": 2, **PP2, "parallel__schedule": "zero-bubble"},
    "dp4-ep2-zero3": {"dp": 4, "parallel__ep": 2, "parallel__zero": 3},
    "dp4-ep2-zero1": {"dp": 4, "parallel__ep": 2, "parallel__zero": 1},
}
LAYOUTS |= EXPERT_LAYOUTS
NO_DROPOUT = {"rank": 4, "alpha": 6.0}
DORA = {**NO_DROPOUT, "kind": "dora"}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (SHAPES["llama"], LORA),
    "gpt": ({}, LORA),
    "latent": (SHAPES["latent"], LORA),
    "dora": ({**SHAPES["llama"]}, DORA),
    "dora-gpt": ({}, {**DORA, "targets": ["c_attn", "c_proj", "c_fc"]}),
    "dora-latent": (SHAPES["latent"], DORA),
    "dropped-dora": ({**SHAPES["llama"]}, {**DORA, "dropout": 0.1}),
    "experts": (MOE, NO_DROPOUT),
    "fused-experts": (MOE, {**NO_DROPOUT, "targets": ["gate_up_proj", "linear_qkv"]}),
    "deepseek": (
        {**MOE, **DEEPSEEK},
        {**NO_DROPOUT, "targets": ["mlp", "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa"]},
    ),
    "saved": ({**SHAPES["llama"]}, {**LORA, "targets": ["o_proj", "v_proj"], "modules_to_save": ["lm_head"]}),
    "head": ({**SHAPES["llama"]}, {**LORA, "targets": ["lm_head", "linear_qkv", "down_proj"]}),
}
OTHERS = {  # of families whose layers are built otherwise
    "bert": (SHAPES["bert-pre"], {**LORA, "targets": ["attention", "mlp"]}),
    "t5": (SHAPES["t5"], {**LORA, "targets": ["attention", "mlp"]}),
    "glm": (SHAPES["glm"], LORA),
}
MODELS |= OTHERS
OF_OTHERS = {"bert": ("tp2-sp-full", "dp2-zero3"), "t5": ("dp2-zero3",), "glm": ("dp2-zero3",)}
QUICK = {("llama", "tp2"), ("llama", "pp2"), ("gpt", "cp2-full"), ("llama", "dp2-zero3"), ("experts", "tp2-sp-ep2")}
QUICK |= {("latent", "tp2-sp-full"), ("dora", "tp2-full-dry"), ("dora-gpt", "dp2-zero3")}
CASES = [
    pytest.param(model, layout, marks=[pytest.mark.slow] * ((model, layout) not in QUICK))
    for model in MODELS
    for layout in LAYOUTS
    if (layout in EXPERT_LAYOUTS) is ("model__experts" in MODELS[model][0])
    and (model not in OTHERS or layout in OF_OTHERS[model])
    and not (model == "dropped-dora" and "tp" in LAYOUTS[layout])
]


def job_of(data: Path, model: str, changes: dict[str, Any]) -> JobSpec:
    ranks = prod(changes.get(axis, 1) for axis in ("tp", "dp", "parallel__cp", "parallel__pp"))
    shape, adapter = MODELS[model]
    usual = {"training__dtype": "fp64", "training__steps": 4, "checkpoint__at_end": False}
    own = {"training__adapter": adapter, "checkpoint__interval": 0, "cluster__gpus_per_node": ranks}
    return tiny_job(data, **{**usual, **shape, **own, **changes})


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory):
    """Trainings of one process, by model and changes."""
    done: dict[str, list[dict[str, Any]]] = {}

    def trained(model: str, changes: dict[str, Any]) -> list[dict[str, Any]]:
        key = repr((model, changes))
        if key not in done:
            done[key] = train(job_of(data, model, changes), tmp_path_factory.mktemp("alone"))
        return done[key]

    return trained


def is_trained(job: JobSpec) -> Callable[[str], bool]:
    saved = {"lm_head": "head.weight"}
    names = {saved[name] for name in job.training.adapter.modules_to_save}
    return lambda name: ".lora." in name or name in names


@pytest.mark.parametrize(("model", "layout"), CASES)
@pytest.mark.quick(1)
def test_every_layout_trains_adapters_as_one_process(
    data: Path, tmp_path: Path, alone, model: str, layout: str
) -> None:
    """Losses, norms and gradients are those of one process; messages and parameters the planned."""
    changes = LAYOUTS[layout]
    job = job_of(data, model, changes)
    ranks = train(job, tmp_path, timeout=240)
    one = alone(model, {key: changes[key] for key in changes if key in DRY})
    for name in ("loss", "grad_norm"):
        assert column(ranks, name) == pytest.approx(column(one, name), rel=1e-10), name
    names = same_gradients(ranks, one)
    assert names and all(map(is_trained(job), names))
    estimate = tiny_plan(job).estimate
    for rank in ranks:
        stage = rank["coords"]["pp"]
        assert rank["count"] == estimate.memory[stage].parameters
        assert rank["traffic"] == planned_traffic(estimate.messages[stage])
