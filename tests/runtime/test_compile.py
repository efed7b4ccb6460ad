"""launch.compile changes how a layer is computed, not what: float64 losses to 1e-10."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.tiny import column, tiny_job, train

FEW: dict[str, Any] = {
    "training__dtype": "fp64", "training__steps": 3, "training__eval_samples": 0,
    "checkpoint__interval": 0, "checkpoint__at_end": False,
}  # fmt: skip
DRY = {"training__dropout": 0.0, "training__attention_dropout": 0.0}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "alone": (1, 1, {}), "dry": (1, 1, DRY), "tp2": (2, 1, {}),
    "full": (1, 1, {"training__recompute": "full"}),
    "tp2-sp-full": (2, 1, {"parallel__sequence_parallel": True, "training__recompute": "full"}),
    "2d": (4, 1, {"parallel__tensor_mode": "2d", "training__micro_batch_size": 2}),
    "dp2-zero3": (1, 2, {"parallel__zero": 3}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_layers_compute_the_same(data: Path, tmp_path: Path, layout: str) -> None:
    tp, dp, how = LAYOUTS[layout]
    one, many = (
        train(tiny_job(data, tp, dp, **FEW, **how, launch__compile=chosen), tmp_path / str(chosen),
              timeout=240)
        for chosen in (False, True)
    )  # fmt: skip
    assert column(many) == pytest.approx(column(one), rel=1e-10)
    assert [rank["traffic"] for rank in many] == [rank["traffic"] for rank in one]
