"""The loss does not tell the layout: 20 steps of every layout that fits in 8 ranks, in float32 and
with dropout on, give the losses of one process to 1e-5.

The set: {tp 1, 2} x {pp 1, 2, 4} x {vpp 1, 2} x {dp 1, 2} x {cp 1, 2} x {zero 0..3} x {sequence
parallel} x {schedules}, less what repeats another: sequence parallelism needs tp, ZeRO dp, a
schedule stages, and interleaving is what two chunks a stage run. Besides, the grids of tensor
parallelism in 2, 2.5 and 3 dimensions, alone and with the axes around them. `make test-all` runs
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.train.runtime.test_axes import SHAPES
from tests.train.runtime.test_tensor_modes import grid
from tests.train.runtime.tiny import STEPS, column, tiny_job, train

MOST_RANKS, SAME = 8, 1e-5
# 4 micro batches a step whatever dp is; 8 layers where 4 stages have two chunks each.
SMALL = {"model__layers": 4, "checkpoint__interval": 0, "checkpoint__at_end": False, "training__eval_samples": 0}
EIGHT = {**SMALL, "model__layers": 8}
FAMILIES = {
    "llama": {**SMALL, **SHAPES["llama"], "model__layers": 4},
    "bert": {**SMALL, **SHAPES["bert"], "model__layers": 4},
    "t5": {**SMALL, **SHAPES["t5"], "model__layers": 2, "model__decoder_layers": 2},
    "glm": {**SMALL, **SHAPES["glm"], "model__layers": 4},
}


def layouts() -> Iterator[dict[str, Any]]:
    """Of more than one rank."""
    for tp, dp, cp, pp in product((1, 2), (1, 2), (1, 2), (1, 2, 4)):
        world = tp * dp * cp * pp
        if not 1 < world <= MOST_RANKS:
            continue
        cuts = [("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2)]
        splits, zeros = (False, True)[:tp], range(4 if dp > 1 else 1)
        for (schedule, vpp), split, zero in product(cuts if pp > 1 else cuts[:1], splits, zeros):
            yield {
                "tp": tp,
                "dp": dp,
                "parallel__cp": cp,
                "parallel__pp": pp,
                "parallel__vpp": vpp,
                "parallel__schedule": schedule,
                "parallel__zero": zero,
                "parallel__sequence_parallel": split,
                "cluster__gpus_per_node": world,
                "training__micro_batch_size": 2 // dp,
            }


def ident(layout: dict[str, Any]) -> str:
    """`tp2-dp2-zero3`: what is not 1 or 0."""
    short = {k.split("__")[-1]: v for k, v in layout.items()}
    sizes = [f"{k}{short[k]}" for k in ("tp", "pp", "vpp", "dp", "cp", "zero") if short[k] > 1]
    zero = ["zero1"] if short["zero"] == 1 else []
    schedule = [short["schedule"]] if short["pp"] > 1 else []
    return "-".join([*sizes, *zero, *schedule, *["sp"] * short["sequence_parallel"]])


ALL = {ident(layout): layout for layout in layouts()}
OF_FAMILIES = ("tp2-sp", "cp2", "dp2-zero3", "pp2-1f1b", "tp2-pp2-dp2-zero1-zero-bubble")

FULL, ZERO1 = {"training__recompute": "full"}, {"parallel__zero": 1}
GRIDS: dict[str, dict[str, Any]] = {
    "2d": grid("2d", 4),
    "2.5d": grid("2.5d", 4),
    "2.5d-deep": grid("2.5d", 8),
    "3d": grid("3d", 8),
    "2d-full": grid("2d", 4, **FULL),
    "3d-full": grid("3d", 8, **FULL),
    "2d-dp2-zero1": grid("2d", 4, dp=2, **ZERO1),
    "2d-pp2": grid("2d", 4, pp=2),
    "2.5d-dp2-zero1-full": grid("2.5d", 4, dp=2, **ZERO1, **FULL),
}
OF_GRIDS = {"gpt": EIGHT, "llama": FAMILIES["llama"]}


@pytest.fixture(scope="module")
def one_process(data, tmp_path_factory):
    """Losses of one process, by model."""
    done: dict[str, list[float]] = {}

    def losses(name: str, model: dict[str, Any]) -> list[float]:
        if name not in done:
            done[name] = column(train(tiny_job(data, **model), tmp_path_factory.mktemp("one")))
        return done[name]

    return losses


def strays(data: Path, folder: Path, model: dict[str, Any], layout: dict[str, Any]) -> list[float]:
    ranks = train(tiny_job(data, **model, **layout), folder)
    assert all(column([rank]) == column(ranks) for rank in ranks), "ranks know different losses"
    return column(ranks)


def test_the_set_is_whole() -> None:
    """By hand: 30 layouts of one stage and 30 x 4 of two, less those of 16 ranks, 2 x 4 x 4; of
    four stages those of 2 ranks a stage, 1 + 2 + 4 + 1, by 4 schedules; less one process."""
    assert len(ALL) == 30 + (120 - 32) + 4 * 8 - 1
    assert ALL.keys() >= {*OF_FAMILIES}


@pytest.mark.slow  # in float64 and few steps: test_axes.py, test_pipeline.py, zero/test_zero.py
@pytest.mark.parametrize("name", ALL)
def test_gpt(data, one_process, tmp_path: Path, name: str) -> None:
    chunks = ALL[name]["parallel__pp"] * ALL[name]["parallel__vpp"]
    model = EIGHT if chunks > 4 else SMALL
    found = strays(data, tmp_path, model, ALL[name])
    assert len(found) == STEPS and found[-1] < found[0] - 0.5
    layers = model["model__layers"]
    assert found == pytest.approx(one_process(f"gpt of {layers} layers", model), rel=SAME)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", OF_FAMILIES)
def test_families(data, one_process, tmp_path: Path, family: str, name: str) -> None:
    found = strays(data, tmp_path, FAMILIES[family], ALL[name])
    assert found == pytest.approx(one_process(family, FAMILIES[family]), rel=SAME)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", OF_GRIDS)
@pytest.mark.parametrize("name", GRIDS)
def test_grids(data, one_process, tmp_path: Path, family: str, name: str) -> None:
    """Two layers; test_tensor_modes.py compares gradients too, in float64."""
    model = {**OF_GRIDS[family], "model__layers": 2}
    found = strays(data, tmp_path, {**model, "training__micro_batch_size": 4}, GRIDS[name])
    assert len(found) == STEPS
    assert found == pytest.approx(one_process(f"{family} of two layers", model), rel=SAME)
