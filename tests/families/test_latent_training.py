"""A GPT with latent attention has the same losses in every layout, in float64 and with dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpctl.families import get_table
from tests.runtime.tiny import column, make_data, tiny_job, train

LATENT: dict[str, Any] = {
    "model__attention_kind": "mla", "model__q_lora_rank": 12, "model__kv_lora_rank": 10,
    "model__qk_nope_head_dim": 6, "model__qk_rope_head_dim": 4, "model__v_head_dim": 8,
    "model__position": "rotary", "model__norm": "rmsnorm", "model__bias": False,
    "model__activation": "swiglu", "model__ffn": 64,
}  # fmt: skip
SPLIT = {"parallel__sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {  # tp, cp, dp, pp, settings
    "pp2": (1, 1, 1, 2, {}),
    "dp2-zero3": (1, 1, 2, 1, {"parallel__zero": 3}),
    "tp2": (2, 1, 1, 1, {}),
    "tp2-sp": (2, 1, 1, 1, SPLIT),
    "cp2": (1, 2, 1, 1, {"training__recompute": "selective"}),
    "tp2-sp-cp2-full": (2, 2, 1, 1, {**SPLIT, "training__recompute": "full"}),
    "tp2-sp-pp2-zero-bubble": (2, 1, 1, 2, {**SPLIT, "parallel__schedule": "zero-bubble"}),
}
QUICK = ("pp2", "tp2-sp")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("latent"))


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _trained(data, tmp_path_factory.mktemp("one"), 1, 1, 1, 1, {})


def _trained(
    data: Path, folder: Path, tp: int, cp: int, dp: int, pp: int, changes: dict[str, Any]
) -> list[dict[str, Any]]:
    job = tiny_job(
        data, tp, dp, parallel__cp=cp, parallel__pp=pp, cluster__gpus_per_node=tp * cp * dp * pp,
        training__dtype="fp64", training__steps=4, checkpoint__interval=0,
        checkpoint__at_end=False, **LATENT, **changes,
    )  # fmt: skip
    return train(job, folder)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in LAYOUTS]
)
def test_a_layout_trains_as_one_process(
    data: Path, alone: list[dict[str, Any]], tmp_path: Path, name: str
) -> None:
    ranks = _trained(data, tmp_path, *LAYOUTS[name])
    losses = column(alone)
    assert losses[-1] < losses[0] - 0.1
    for what in ("loss", "grad_norm"):
        assert column(ranks, what) == pytest.approx(column(alone, what), rel=1e-10)


def test_one_rank_holds_the_parameters_of_the_table(alone: list[dict[str, Any]]) -> None:
    job = tiny_job(Path("nowhere"), **LATENT)
    assert job.model is not None
    planned = {weight.name: weight.shape for weight in get_table(job.model, tp=1).weights()}
    (rank,) = alone
    assert {name: tuple(value.shape) for name, (*_, value) in rank["weights"].items()} == planned
