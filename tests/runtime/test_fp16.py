"""fp16: float32 masters and gradients; a loss scale that follows overflows, alike on all ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mpctl.checkpoint.manifest import read_manifest
from mpctl.launch.summary import planned_traffic
from mpctl.runtime.update import LossScale
from tests.runtime.tiny import column, make_trainer, tiny_job, tiny_plan, train

FP16 = {"training__dtype": "fp16", "training__eval_samples": 0, "training__global_batch_size": 4,
        "checkpoint__interval": 0, "checkpoint__at_end": False}  # fmt: skip
HUGE = 2.0**23  # the gradients of a fresh model overflow from about 2^18 on


def small(data: Path, tp: int = 1, dp: int = 1, **changes: Any) -> Any:
    return tiny_job(data, tp, dp, **{**FP16, **changes})


def test_a_loss_scale_by_hand() -> None:
    scale = LossScale(8.0, window=2, least=1.0)
    found = []
    for is_well in (False, True, True, False):
        scale.went_well() if is_well else scale.overflowed()
        found.append(scale.value)
    assert found == [4.0, 4.0, 8.0, 4.0] and scale.skipped == 2
    again = LossScale(2.0**16, window=2, least=1.0)
    again.load(scale.state())
    assert again == scale
    with pytest.raises(FloatingPointError, match=r"loss scale of 1, and .*min_loss_scale is 1:"):
        for _ in range(3):
            scale.overflowed()


def test_fp16_tracks_float32(data: Path, tmp_path: Path) -> None:
    """11 bits: a rounding is up to 0.05 %."""
    exact = {"training__dtype": "fp32", "training__steps": 6}
    curves = [
        column([{"records": list(make_trainer(small(data, **how), tmp_path / str(i)).run())}])
        for i, how in enumerate((exact, {"training__steps": 6}))
    ]
    assert curves[1] == pytest.approx(curves[0], rel=5e-4)
    assert curves[1] != pytest.approx(curves[0], rel=1e-7)


def test_an_overflow_is_skipped_by_all_and_training_goes_on(data: Path, tmp_path: Path) -> None:
    """With slices, of which only one rank may see the overflow; and the step's messages are the
    planned ones, skipped or not."""
    changes = {"training__loss_scale": HUGE, "training__loss_scale_window": 4,
               "training__steps": 15, "parallel__zero": 1, "training__micro_batch_size": 1,
               "model__layers": 1,
               "training__global_batch_size": 2, "training__warmup_steps": 0}  # fmt: skip
    job = small(data, 1, 2, **changes)
    ranks = train(job, tmp_path)
    told = [[(r["loss_scale"], r.get("skipped"), r["grad_norm"]) for r in rank["records"]]
            for rank in ranks]  # fmt: skip
    assert told[0] == told[1]
    scales, skipped, norms = zip(*told[0], strict=True)
    first = skipped.index(None)
    assert 2 < first < 9 and all(skipped[:first])
    assert scales[: first + 1] == tuple(HUGE / 2**i for i in range(first + 1))
    assert all((norm is None) == bool(skip) for norm, skip in zip(norms, skipped, strict=True))
    assert all(math.isfinite(loss) for loss in column(ranks))
    assert min(column(ranks)[first:]) < min(column(ranks)[:first]) - 0.02
    planned = planned_traffic(tiny_plan(job).estimate.messages[0])
    assert all(rank["traffic"] == planned for rank in ranks)


def test_a_skipped_step_changes_nothing_and_is_remembered(data: Path, tmp_path: Path) -> None:
    job = small(data, training__loss_scale=HUGE, training__steps=1)
    trainer = make_trainer(job, tmp_path / "run")
    before = [p.detach().clone() for p in trainer.model.parameters()]
    (record,) = trainer.run()
    assert record["skipped"] and json.loads(json.dumps(record))["grad_norm"] is None
    assert all(p.equal(b) for p, b in zip(trainer.model.parameters(), before, strict=True))
    trainer.save()
    saved = read_manifest(tmp_path / "run/checkpoints/step-1")
    assert (saved.step, saved.updates) == (1, 0)
    again = make_trainer(job, tmp_path / "run")
    assert again.loss_scale == trainer.loss_scale and again.loss_scale.value == HUGE / 2
    assert {float(s["step"]) for s in again.optimizer.adam.state.values()} == {0.0}


def test_below_the_least_scale_the_run_ends(data: Path, tmp_path: Path) -> None:
    job = small(data, training__loss_scale=HUGE, training__min_loss_scale=HUGE)
    with pytest.raises(FloatingPointError, match=r"lower training.learning_rate, or use .* bf16"):
        list(make_trainer(job, tmp_path).run())
