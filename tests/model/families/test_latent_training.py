"""A GPT with latent attention in stages and shards has the losses of one process, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpctl.model.families import get_table
from tests.train.runtime.test_axes import SHAPES
from tests.train.runtime.tiny import column, make_data, tiny_job, train

SPLIT = {"parallel__sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {  # tp, cp, dp, pp, settings
    "pp2": (1, 1, 1, 2, {}),
    "dp2-zero3": (1, 1, 2, 1, {"parallel__zero": 3}),
    "cp2-selective": (1, 2, 1, 1, {"training__recompute": "selective"}),
    "tp2-sp-pp2-zero-bubble": (2, 1, 1, 2, {**SPLIT, "parallel__schedule": "zero-bubble"}),
}  # the axes alone: tests/train/runtime/test_axes.py
QUICK = ("pp2",)


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
        data,
        tp,
        dp,
        parallel__cp=cp,
        parallel__pp=pp,
        cluster__gpus_per_node=tp * cp * dp * pp,
        training__dtype="fp64",
        training__steps=4,
        checkpoint__interval=0,
        checkpoint__at_end=False,
        **SHAPES["latent"],
        **changes,
    )
    return train(job, folder)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in LAYOUTS])
def test_a_layout_trains_as_one_process(data: Path, alone: list[dict[str, Any]], tmp_path: Path, name: str) -> None:
    ranks = _trained(data, tmp_path, *LAYOUTS[name])
    losses = column(alone)
    assert losses[-1] < losses[0] - 0.1
    for what in ("loss", "grad_norm"):
        assert column(ranks, what) == pytest.approx(column(alone, what), rel=1e-10)


def test_one_rank_holds_the_parameters_of_the_table(alone: list[dict[str, Any]]) -> None:
    job = tiny_job(Path("nowhere"), **SHAPES["latent"])
    assert job.model is not None
    planned = {weight.name: weight.shape for weight in get_table(job.model, tp=1).weights()}
    (rank,) = alone
    assert {name: tuple(value.shape) for name, (*_, value) in rank["weights"].items()} == planned
