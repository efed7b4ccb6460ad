"""Trainings in a late world: no use of a tensor is in no order with a message, no work is
forgotten, no schedule hangs, and every loss and norm is that of the ordinary world, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.late.ranks import train_late
from tests.train.runtime.test_axes import SHAPES
from tests.train.runtime.test_experts import BIASED, MOE
from tests.train.runtime.test_pipeline import T5, ZERO, layout
from tests.train.runtime.tiny import column, tiny_job, train

SEQUENCE = {"parallel__sequence_parallel": True}
FULL = {"training__recompute": "full"}
OFFLOAD = {**FULL, "training__offload_activations": True}
FOUR = {"model__layers": 4}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"dp": 2, "parallel__zero": stage, **more}


CASES: dict[str, dict[str, Any]] = {"vpp": {**layout(2, 2, "interleaved"), **FOUR}}
SLOW: dict[str, dict[str, Any]] = {
    "tp, sp": {"tp": 2, **SEQUENCE},
    "zero 3": zero(3, **OFFLOAD),
    "tp": {"tp": 2},
    "1f1b": {**layout(2), **FOUR},
    "zero-bubble": {**layout(2, schedule=ZERO), **FOUR},
    "zero 1, buckets": zero(1, parallel__bucket_bytes=20_000),
    "zero 1": zero(1),
    "cp": layout(1, cp=2),
    "dp": {"dp": 2},
    "zero 2": zero(2, parallel__bucket_bytes=20_000),
    "zero 3, tp": zero(3, tp=2),
    "zero 3, kept": zero(3),
    "zero 2, pp": {**layout(2, dp=2), **FOUR, "parallel__zero": 2},
    "gpipe": {**layout(2, schedule="gpipe"), **FOUR},
    "4 stages": {**layout(4), **FOUR},
    "3 stages, zero-bubble": {**layout(3, schedule=ZERO), "model__layers": 3},
    "2 chunks of 2 stages, 1f1b": {**layout(2, 2), **FOUR},
    "2 chunks, tp": {**layout(2, 2, "interleaved", tp=2), **FOUR, **SEQUENCE},
    "fp16": {"tp": 2, "training__dtype": "fp16"},
    "bf16": {**layout(2, dp=2), "training__dtype": "bf16", "parallel__zero": 1},
    "2d": {"tp": 4, "parallel__tensor_mode": "2d"},
    "2.5d": {"tp": 4, "parallel__tensor_mode": "2.5d"},
    "3d": {"tp": 8, "parallel__tensor_mode": "3d", "model__heads": 8, "training__micro_batch_size": 4},
    "t5": {**layout(2, tp=2), **T5},
    "bert": {**layout(2, cp=2), **SHAPES["bert"]},
    "glm": {**layout(2, 2), **SHAPES["glm"], **FOUR},
    "experts": {"dp": 2, "parallel__ep": 2, **MOE, **BIASED},
    "experts, zero 3": {"dp": 4, "parallel__ep": 2, "parallel__zero": 3, **MOE, **FULL},
    "experts, tp": {"tp": 2, "dp": 2, "parallel__ep": 2, "parallel__etp": 2, **MOE, **SEQUENCE},
    "experts, pp": {**layout(2, dp=2, schedule=ZERO), "parallel__ep": 2, **MOE},
    "llama": {"tp": 2, "dp": 2, **SEQUENCE, **SHAPES["llama"], "parallel__zero": 1},
}


def late_job(data: Path, changes: dict[str, Any]):
    usual = {
        "training__steps": 3,
        "checkpoint__interval": 2,
        "launch__shared_memory": False,
        "training__clip_norm": 0.0,
    }
    return tiny_job(data, **{**usual, **changes})


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in (*CASES, *SLOW)])
def test_losses_are_those_of_the_ordinary_world(data, tmp_path, name: str) -> None:
    """Two steps, a checkpoint, a third, an evaluation, and the checkpoint at the end."""
    job = late_job(data, {**CASES, **SLOW}[name])
    usual, late = train(job, tmp_path / "usual"), train_late(job, tmp_path / "late")
    for figure in ("loss", "grad_norm"):
        assert column(late, figure) == column(usual, figure)
    assert late[0]["records"][-1]["validation_loss"] == usual[0]["records"][-1]["validation_loss"]
    for step in (2, 3):
        assert _files(tmp_path / "late", step) == _files(tmp_path / "usual", step)


def _files(run_dir: Path, step: int) -> dict[str, bytes]:
    folder = run_dir / f"checkpoints/step-{step}"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["zero 3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vpp", "zero 2, pp"))]
)
def test_a_checkpoint_is_resumed(data, tmp_path, name: str) -> None:
    """A second training of the same run directory goes on after its last checkpoint."""
    changes = {**CASES, **SLOW}[name]
    usual = train(late_job(data, {**changes, "training__steps": 4}), tmp_path / "usual")
    train_late(late_job(data, changes), tmp_path / "late")
    late = train_late(late_job(data, {**changes, "training__steps": 4}), tmp_path / "late")
    assert column(late, "step") == [4]
    assert column(late) == column(usual)[3:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["4 stages", "2 chunks, tp", "zero 2, pp", "zero 3, tp", "2d"])
def test_no_two_messages_have_to_travel_at_once(data, tmp_path, name: str) -> None:
    """With all of a rank's messages one after the other, whatever their group, nothing hangs: so
    none relies on room for two kernels of NCCL, nor on CUDA_DEVICE_MAX_CONNECTIONS."""
    job = late_job(data, SLOW[name])
    late = train_late(job, tmp_path / "late", is_serial=True)
    assert column(late) == column(train(job, tmp_path / "usual"))
