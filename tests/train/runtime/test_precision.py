"""Data types and compilation change what a run computes with, not what it trains."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.train.runtime.test_axes import SHAPES
from tests.train.runtime.test_tensor_modes import grid
from tests.train.runtime.tiny import column, tiny_job, train

NEAR = 2e-3


GRIDS = [("gpt", grid("2d", 4)), ("llama", grid("3d", 8, training__micro_batch_size=4))]


def curve(data: Any, folder: Any, shape: str, dtype: str, tp: int = 1, **changes: Any) -> list[float]:
    job = tiny_job(
        data,
        tp,
        training__dtype=dtype,
        training__steps=12,
        checkpoint__interval=0,
        checkpoint__at_end=False,
        **{**SHAPES[shape], **changes},
    )
    ranks = train(job, folder / f"{shape}-{dtype}-{tp}")
    return [*column(ranks), ranks[0]["records"][-1]["validation_loss"]]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "bert-pre"])
def test_bf16_tracks_float32(data: Any, tmp_path: Any, shape: str) -> None:
    exact = curve(data, tmp_path, shape, "fp32")
    assert exact[-2] < exact[0] - 0.3  # it learns, so there is something to track
    coarse = curve(data, tmp_path, shape, "bf16")
    assert coarse == pytest.approx(exact, rel=NEAR)
    assert coarse != pytest.approx(exact, rel=1e-6)
    assert curve(data, tmp_path, shape, "bf16", 2) == pytest.approx(exact, rel=NEAR)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "how"), GRIDS)
def test_bf16_over_a_grid_tracks_float32(data: Any, tmp_path: Any, shape: str, how: dict[str, Any]) -> None:
    """Sums of 16-bit blocks are rounded at each step of a product."""
    exact = curve(data, tmp_path, shape, "fp32")
    coarse = curve(data, tmp_path, shape, "bf16", **how)
    assert coarse == pytest.approx(exact, rel=NEAR)
    assert coarse != pytest.approx(exact, rel=1e-6)


FEW: dict[str, Any] = {
    "training__dtype": "fp64",
    "training__steps": 3,
    "training__eval_samples": 0,
    "checkpoint__interval": 0,
    "checkpoint__at_end": False,
}
DRY = {"training__dropout": 0.0, "training__attention_dropout": 0.0}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "alone": (1, 1, {}),
    "dry": (1, 1, DRY),
    "tp2": (2, 1, {}),
    "full": (1, 1, {"training__recompute": "full"}),
    "tp2-sp-full": (2, 1, {"parallel__sequence_parallel": True, "training__recompute": "full"}),
    "2d": (4, 1, {"parallel__tensor_mode": "2d", "training__micro_batch_size": 2}),
    "dp2-zero3": (1, 2, {"parallel__zero": 3}),
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_layers_compute_the_same(data: Path, tmp_path: Path, layout: str) -> None:
    tp, dp, how = LAYOUTS[layout]
    one, many = (
        train(tiny_job(data, tp, dp, **FEW, **how, launch__compile=chosen), tmp_path / str(chosen), timeout=240)
        for chosen in (False, True)
    )
    assert column(many) == pytest.approx(column(one), rel=1e-10)
    assert [rank["traffic"] for rank in many] == [rank["traffic"] for rank in one]
