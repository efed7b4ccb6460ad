"""An update that is given to the device before the host knows the norm is the update that the host
would make, and where the norm is not finite it changes nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.layout.topology import job_topology
from mpctl.runtime.build import build_trainer
from mpctl.runtime.environment import RuntimeEnvironment
from mpctl.runtime.step_guard import NotFinite
from mpctl.runtime.train import Trainer
from mpctl.runtime.update import clip_factor
from mpctl.spec.job import JobSpec
from tests.runtime.tiny import tiny_job

FEW = {"training__steps": 4, "training__eval_samples": 0, "checkpoint__interval": 0,
       "checkpoint__at_end": False, "training__global_batch_size": 4, "training__clip_norm": 0.5,
       "training__warmup_steps": 0}  # fmt: skip
FP16 = {"training__dtype": "fp16", "training__loss_scale": 2.0**23, "training__steps": 8,
        "training__loss_scale_window": 2, "model__layers": 1}  # fmt: skip


def trainer_of(job: JobSpec, folder: Path, *, runs_ahead: bool) -> Trainer:
    """A trainer on a CPU that steps as on a device that runs ahead of the host, or as on a CPU."""
    environment = RuntimeEnvironment.of_machine(job, folder, local_rank=0)
    environment = replace(environment, runs_ahead=runs_ahead)
    return build_trainer(folder, job, job_topology(job), 0, environment)


def state_of(trainer: Trainer) -> list[Tensor]:
    """Parameters, moments and AdamW's counts."""
    state = trainer.optimizer.adam.state
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
def test_both_ways_train_alike(
    data: Path, tmp_path: Path, changes: dict[str, Any], most: float
) -> None:
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
            counts = {float(s["step"]) for s in trainer.optimizer.adam.state.values()}
            assert counts <= {float(trainer.step - skipped)}
            assert trainer.optimizer.updates == trainer.step - skipped
            assert all(p.isfinite().all() for p in state_of(trainer)) if counts else True
        assert trainer.loss_scale is not None and trainer.loss_scale.skipped == skipped
        assert 0 < skipped < len(records)
        told.append([(r["loss_scale"], r.get("skipped"), r["grad_norm"] is None) for r in records])
    assert told[0] == told[1]


@pytest.mark.parametrize("zero", [0, 2])
def test_a_norm_that_is_not_finite_leaves_all_as_it_was(
    data: Path, tmp_path: Path, zero: int
) -> None:
    """Nothing is known on the host while the update is given; the step is then computed again."""
    trainer = trainer_of(
        tiny_job(data, **{**FEW, "parallel__zero": zero}), tmp_path, runs_ahead=True
    )
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
