"""An update that is given to the device before the host knows the norm is the update that the host
would make, and where the norm is not finite it changes nothing; fp16's loss scale.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.core.errors import InputError
from mpctl.model.layout.job_layout import JobLayout
from mpctl.records.checkpoint.manifest import Manifest, read_manifest
from mpctl.run.launch.summary import planned_traffic
from mpctl.spec.job import JobSpec
from mpctl.spec.load import parse
from mpctl.train.runtime.build import build_trainer
from mpctl.train.runtime.environment import RuntimeEnvironment
from mpctl.train.runtime.step_guard import NotFinite
from mpctl.train.runtime.train import Trainer
from mpctl.train.runtime.update import LossScale, clip_factor
from tests.ranks import run_ranks
from tests.train.runtime.tiny import column, make_trainer, tiny_job, tiny_plan, train

FEW = {
    "training__steps": 4,
    "training__eval_samples": 0,
    "checkpoint__interval": 0,
    "checkpoint__at_end": False,
    "training__global_batch_size": 4,
    "training__clip_norm": 0.5,
    "training__warmup_steps": 0,
}
FP16 = {
    "training__dtype": "fp16",
    "training__loss_scale": 2.0**23,
    "training__steps": 8,
    "training__loss_scale_window": 2,
    "model__layers": 1,
}


def trainer_of(job: JobSpec, folder: Path, *, runs_ahead: bool, rank: int = 0) -> Trainer:
    """A trainer on a CPU that steps as on a device that runs ahead of the host, or as on a CPU."""
    environment = RuntimeEnvironment.of_machine(job, folder, local_rank=rank)
    environment = replace(environment, runs_ahead=runs_ahead)
    return build_trainer(folder, JobLayout.of(job), rank, environment)


def state_of(trainer: Trainer) -> list[Tensor]:
    """Parameters, moments and AdamW's counts."""
    state = trainer.optimizer.rule.state
    moments = [tensor for value in trainer.optimizer.values for tensor in state[value].values()]
    return [tensor.detach().clone() for tensor in (*trainer.model.parameters(), *moments)]


def test_clipping_by_hand() -> None:
    assert [clip_factor(norm, 2.0) for norm in (4.0, 2.0, 0.0)] == [0.5, 1.0, 1.0]
    assert clip_factor(4.0, 0.0) == 1.0


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 2e-6),
        ({"training__clip_norm": 0.0}, 0.0),
        ({"training__dtype": "fp64"}, 1e-13),
        ({"training__dtype": "bf16", "training__gradient_dtype": "bf16"}, 5e-3),
        ({"parallel__zero": 2, "training__on_nonfinite": "skip"}, 2e-6),
    ],
)
def test_both_ways_train_alike(data: Path, tmp_path: Path, changes: dict[str, Any], most: float) -> None:
    """The norm is 1 to 3, so that every step is clipped; without clipping all bits are the same."""
    job, found = tiny_job(data, **{**FEW, **changes}), []
    for ahead in (False, True):
        trainer = trainer_of(job, tmp_path / str(ahead), runs_ahead=ahead)
        records = list(trainer.run())
        found.append([(r["loss"], r["grad_norm"], r["learning_rate"]) for r in records])
        assert trainer.optimizer.updates == 4
    host, device = (torch.tensor(figures, dtype=torch.float64) for figures in found)
    assert (host[:, 1] > 0.5).all()
    assert ((host - device).abs() / host).max() <= most


def test_an_overflow_of_fp16_changes_nothing(data: Path, tmp_path: Path) -> None:
    """The loss scale falls until a step goes well, alike in both ways."""
    job, told = tiny_job(data, **{**FEW, **FP16}), []
    for ahead in (False, True):
        trainer = trainer_of(job, tmp_path / str(ahead), runs_ahead=ahead)
        records, skipped = [], 0
        for record in trainer.run():
            records.append(record)
            skipped += bool(record.get("skipped"))
            counts = {float(s["step"]) for s in trainer.optimizer.rule.state.values()}
            assert counts <= {float(trainer.step - skipped)}
            assert trainer.optimizer.updates == trainer.step - skipped
            assert all(p.isfinite().all() for p in state_of(trainer)) if counts else True
        assert trainer.loss_scale is not None and trainer.loss_scale.skipped == skipped
        assert 0 < skipped < len(records)
        told.append([(r["loss_scale"], r.get("skipped"), r["grad_norm"] is None) for r in records])
    assert told[0] == told[1]


@pytest.mark.parametrize("zero", [0, 2])
def test_a_norm_that_is_not_finite_leaves_all_as_it_was(data: Path, tmp_path: Path, zero: int) -> None:
    """Nothing is known on the host while the update is given; the step is then computed again."""
    trainer = trainer_of(tiny_job(data, **{**FEW, "parallel__zero": zero}), tmp_path, runs_ahead=True)
    records = trainer.run()
    next(records)
    weight = dict(trainer.model.named_parameters())["final_norm.weight"]
    weight.register_hook(lambda gradient: gradient * math.inf)
    before = state_of(trainer)
    with pytest.raises(NotFinite, match=r"norm of step 2 is nan: .* of final_norm.weight is not"):
        next(records)
    after = state_of(trainer)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert trainer.optimizer.updates == 1


OVERFLOWING = {
    "training__dtype": "fp16",
    "training__eval_samples": 0,
    "training__global_batch_size": 4,
    "checkpoint__interval": 0,
    "checkpoint__at_end": False,
}
HUGE = 2.0**23  # the gradients of a fresh model overflow from about 2^18 on


def small(data: Path, tp: int = 1, dp: int = 1, **changes: Any) -> Any:
    return tiny_job(data, tp, dp, **{**OVERFLOWING, **changes})


def test_replicas_clip_by_the_same_norm(data: Path, tmp_path: Path) -> None:
    """Two replicas whose groups sum in different orders: their norms are not the same to the last
    bit, here by far more, and their parameters are, in both ways of updating."""
    job = tiny_job(data, 1, 2, **{**FEW, "model__layers": 1, "training__steps": 2})
    first, second = run_ranks(_rounding_otherwise, 2, job.model_dump(mode="json"), str(tmp_path))
    for name, here in first.items():
        assert torch.equal(here, second[name]), name


def _rounding_otherwise(rank: int, size: int, raw: dict[str, Any], folder: str) -> dict[str, Any]:
    job, found = parse(raw), dict[str, Tensor]()
    for ahead in (False, True):
        trainer = trainer_of(job, Path(folder), runs_ahead=ahead, rank=rank)
        norm = trainer.buffer.norm
        trainer.buffer.norm = lambda norm=norm: norm() * (1 + rank / 1000)  # type: ignore[method-assign,misc]
        norms = [record["grad_norm"] for record in trainer.run()]
        found[f"norms, {ahead}"] = torch.tensor(norms)
        for name, parameter in trainer.model.named_parameters():
            found[f"{name}, {ahead}"] = parameter.detach()
    return found


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
    with pytest.raises(ValueError, match="loss_scale has no scale, skipped"):
        again.load({"well": 1.0})
    with pytest.raises(FloatingPointError, match=r"loss scale of 1, and .*min_loss_scale is 1:"):
        for _ in range(3):
            scale.overflowed()


def test_a_loss_scale_stays_finite() -> None:
    """Gradients that are always 0 never overflow."""
    scale = LossScale(2.0**16, window=1, least=1.0)
    for _ in range(2000):
        scale.went_well()
    assert scale.value == 2.0**127 < torch.finfo(torch.float32).max
    scale.overflowed()
    assert scale.value == 2.0**126


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
    changes = {
        "training__loss_scale": HUGE,
        "training__loss_scale_window": 4,
        "training__steps": 15,
        "parallel__zero": 1,
        "training__micro_batch_size": 1,
        "model__layers": 1,
        "training__global_batch_size": 2,
        "training__warmup_steps": 0,
    }
    job = small(data, 1, 2, **changes)
    ranks = train(job, tmp_path)
    told = [[(r["loss_scale"], r.get("skipped"), r["grad_norm"]) for r in rank["records"]] for rank in ranks]
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
    assert {float(s["step"]) for s in again.optimizer.rule.state.values()} == {0.0}
    Manifest(step=1, shards=saved.shards, loss_scale={"skipped": 1.0}).write(tmp_path / "run/checkpoints/step-1")
    with pytest.raises(InputError, match=r"manifest\.json.*loss_scale has no scale, well"):
        make_trainer(job, tmp_path / "run")


def test_below_the_least_scale_the_run_ends(data: Path, tmp_path: Path) -> None:
    job = small(data, training__loss_scale=HUGE, training__min_loss_scale=HUGE)
    with pytest.raises(FloatingPointError, match=r"lower training.learning_rate, or use .* bf16"):
        list(make_trainer(job, tmp_path).run())
