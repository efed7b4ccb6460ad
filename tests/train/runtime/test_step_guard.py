"""Steps that are skipped, alike in every layout, what a rollback asks for, and the rank and
parameter
that a NaN which the sums carry to all ranks came from.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from mpctl.records.rundir.metrics import parse_record
from mpctl.spec.load import parse
from mpctl.spec.training import TrainingSpec
from mpctl.train.runtime import step_guard
from mpctl.train.runtime.process import is_secondary_failure
from mpctl.train.runtime.step_guard import NotFinite, StepGuard, StepRefused, recent_losses
from mpctl.train.runtime.train import Trainer
from tests.ranks import run_ranks
from tests.train.runtime.test_tensor_modes import grid
from tests.train.runtime.tiny import make_trainer, tiny_job

NAN = float("nan")


def guard(**settings: Any) -> StepGuard:
    return StepGuard(TrainingSpec(**{"spike_window": 3, "on_spike": "skip", **settings}))


def judged(one: StepGuard, loss: float | None, norm: float = 1.0, **how: Any) -> str:
    return one.check(9, loss, norm, **{"may_overflow": False, **how}).action


def test_the_example_of_the_module() -> None:
    one = guard()
    for loss in (3.0, 2.0):
        assert judged(one, 100.0) == "update"  # before so many updates none is a spike
        one.made_update(loss)
    one.made_update(4.0)
    assert (judged(one, 6.0), judged(one, 6.1)) == ("update", "skip")
    assert one.check(9, 6.1, 1.0, may_overflow=False).reason == (
        "the loss of step 9 spikes: 6.1 is more than 2 times 3, the median of the last 3"
    )


@pytest.mark.parametrize("action", ["stop", "skip", "rollback"])
def test_what_is_not_finite(action: str) -> None:
    one = guard(on_nonfinite=action)
    assert judged(one, NAN) == judged(one, 2.0, math.inf) == action
    assert judged(one, None, math.inf, may_overflow=True) == "update"  # the loss scale deals with it


def test_skipping_has_an_end() -> None:
    one = guard(on_nonfinite="skip", max_skipped_steps=2)
    assert [judged(one, NAN) for _ in range(2)] == ["skip", "skip"]
    end = one.check(9, NAN, 1.0, may_overflow=False)
    assert (end.action, end.is_spike) == ("stop", False)
    assert end.reason.endswith("after 2 skipped steps in a row (training.max_skipped_steps)")
    one.made_update(1.0)
    assert judged(one, NAN) == "skip"


def test_what_a_resumption_remembers() -> None:
    made = [{"step": n, "loss": float(n)} for n in range(1, 6)]
    lost: list[Any] = [{"step": n, "loss": None, "skipped": True, "skip_reason": "nan"} for n in (6, 7)]
    assert recent_losses([*made, *lost], 3) == ([3.0, 4.0, 5.0], 2)  # type: ignore[list-item]
    assert recent_losses(made, 9)[1] == 0  # type: ignore[arg-type]
    assert recent_losses(lost, 3) == ([], 2)


def test_a_resumption_counts_the_skipped_steps_that_the_run_counted() -> None:
    """Five overflows of fp16, which the loss scale handles, and two losses that are not finite: the next ends
    the run, resumed or not."""
    live, resumed = (guard(on_nonfinite="skip", max_skipped_steps=2) for _ in range(2))
    records: list[Any] = [{"step": n, "loss": 2.0, "skipped": True} for n in range(1, 6)]
    assert [live.check(n, 2.0, math.inf, may_overflow=True).action for n in range(1, 6)] == ["update"] * 5
    resumed.restore(*recent_losses(records, 3))
    assert resumed.skipped == live.skipped == 0
    assert [judged(live, NAN) for _ in range(2)] == ["skip"] * 2
    records += [{"step": n, "loss": None, "skipped": True, "skip_reason": "nan"} for n in (6, 7)]
    resumed.restore(*recent_losses(records, 3))
    assert judged(live, NAN) == judged(resumed, NAN) == "stop"


def test_batches_that_are_left_out() -> None:
    training = TrainingSpec(skip_batches="3-4, 7")
    assert [training.batch_of_step(step) for step in range(1, 7)] == [1, 2, 5, 6, 8, 9]
    for ranges in ("4-3", "1-3,3-5", "5-6,1-2", "0-1", "a", "1-", "-3", ","):
        with pytest.raises(ValidationError):
            TrainingSpec(skip_batches=ranges)


def test_a_record_without_a_loss_is_one_of_a_skipped_step() -> None:
    record = {"step": 3, "loss": None, "tokens": 9, "step_seconds": 1.0, "tokens_per_second": 9.0}
    assert parse_record(json.dumps(record).encode()) is None
    assert parse_record(json.dumps({**record, "skipped": True}).encode()) is not None


def _train_rank(rank: int, size: int, raw: dict[str, Any], run_dir: str, sample: int) -> dict[str, Any]:
    """Records of a training in which the loss of one sample is not a number, and that of SPIKE
    forty times as large."""
    step_guard.CAUSE_FIRST_SECONDS = 0.0
    trainer = make_trainer(parse(raw), Path(run_dir), rank)
    chunk = trainer.pipeline.chunks[-1]
    stage_forward = chunk.stage_forward

    def poisoned(inputs: Any, batch: Any, rng: Any) -> Any:
        (result,) = stage_forward(inputs, batch, rng)
        numbers = batch.samples.tolist()
        factor = NAN if sample in numbers else 40.0 if sample >= 0 and SPIKE in numbers else 1.0
        return (result * factor,)

    if trainer.pipeline.partition.stage == trainer.mesh.pp.size - 1:
        chunk.stage_forward = poisoned  # type: ignore[method-assign]
    records = []
    try:
        for record in trainer.run():
            records.append(record)
    except StepRefused as error:
        return {"words": str(error), "rollback": error.rollback or 0, "records": records}
    return {"records": records, "planned": trainer.step_traffic}


def trained(job: Any, folder: Path, sample: int = -1) -> list[dict[str, Any]]:
    raw = job.model_dump(mode="json")
    return run_ranks(_train_rank, job.world_size, raw, str(folder), sample)


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "dp": {"dp": 2, "parallel__zero": 1},
    "pp": {"parallel__pp": 2, "cluster__gpus_per_node": 2},
}
SHORT = {"training__steps": 8, "checkpoint__interval": 0, "training__eval_samples": 0, "checkpoint__at_end": False}
FOUR = {**SHORT, "training__steps": 4}
BAD, SPIKE = 2 * 8 + 5, 5 * 8 + 2  # samples of steps 3 and 6
SPIKES = {
    "training__on_spike": "skip",
    "training__spike_factor": 1.5,
    "training__spike_window": 2,
    "training__on_nonfinite": "skip",
}


def losses(rank: dict[str, Any]) -> list[float]:
    return [NAN if record["loss"] is None else record["loss"] for record in rank["records"]]


@pytest.fixture(scope="module")
def single(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One rank; a sample of step 3 gives NaN, one of step 6 a large loss."""
    (rank,) = trained(tiny_job(data, **SHORT, **SPIKES), tmp_path_factory.mktemp("one"), BAD)
    return rank


@pytest.mark.parametrize("layout", ["dp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tp", "pp"))])
def test_every_layout_skips_the_same_steps(data: Path, single: dict[str, Any], tmp_path: Path, layout: str) -> None:
    skipped = [record["step"] for record in single["records"] if record.get("skipped")]
    assert skipped == [3, 6] and single["records"][2]["loss"] is None
    reasons = [single["records"][step - 1]["skip_reason"] for step in skipped]
    assert reasons[0] == "the loss of step 3 is nan" and "the loss of step 6 spikes" in reasons[1]
    ranks = trained(tiny_job(data, **SHORT, **SPIKES, **LAYOUTS[layout]), tmp_path, BAD)
    for rank in ranks:
        assert [r["step"] for r in rank["records"] if r.get("skipped")] == skipped
        assert losses(rank) == pytest.approx(losses(single), rel=2e-5, nan_ok=True)


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One rank and nothing bad."""
    (rank,) = trained(tiny_job(data, **FOUR), tmp_path_factory.mktemp("plain"))
    return rank


def test_without_a_bad_step_the_losses_are_those_of_the_default(
    data: Path, plain: dict[str, Any], tmp_path: Path
) -> None:
    """To the last bit: the loss is only shared earlier."""
    (guarded,) = trained(tiny_job(data, **FOUR, training__on_nonfinite="skip"), tmp_path)
    assert losses(plain) == losses(guarded)


def test_a_rollback_names_its_step_on_every_rank(data: Path, tmp_path: Path) -> None:
    job = tiny_job(data, dp=2, **FOUR, training__on_nonfinite="rollback")
    ranks = trained(job, tmp_path, sample=BAD)
    assert [rank["rollback"] for rank in ranks] == [3, 3]
    assert all("the loss of step 3 is nan: first on rank " in rank["words"] for rank in ranks)


def test_left_out_batches_are_not_trained_on(data: Path, plain: dict[str, Any], tmp_path: Path) -> None:
    """Steps 1 and 2 as ever; from step 3 on the losses of batches 4, 5, ..., which have no NaN."""
    job = tiny_job(data, **FOUR, training__skip_batches="3")
    (left_out,) = trained(job, tmp_path, sample=BAD)
    ours, theirs = losses(left_out), losses(plain)
    assert ours[:2] == theirs[:2] and ours[2] != theirs[2]
    assert len(ours) == 4 and all(map(math.isfinite, ours))


def _poison_loss(trainer: Trainer) -> None:
    chunk = trainer.pipeline.chunks[-1]
    stage_forward = chunk.stage_forward

    def poisoned(*args: Any) -> Any:
        (loss,) = stage_forward(*args)
        return (loss * float("nan"),)

    chunk.stage_forward = poisoned  # type: ignore[method-assign]


def _poison_gradient(trainer: Trainer) -> None:
    weight = dict(trainer.model.named_parameters())["final_norm.weight"]
    weight.register_hook(lambda gradient: gradient * float("inf"))


def _poison_parameter(trainer: Trainer) -> None:
    with torch.no_grad():
        next(iter(trainer.model.parameters()))[0] = float("nan")


POISONS = {"loss": _poison_loss, "gradient": _poison_gradient, "parameter": _poison_parameter}


def _poisoned_rank(rank: int, size: int, raw: dict[str, Any], run_dir: str, poison: str, at: int) -> dict[str, Any]:
    step_guard.CAUSE_FIRST_SECONDS = 0.0
    trainer = make_trainer(parse(raw), Path(run_dir), rank)
    records = trainer.run()
    next(records)
    if rank == at:
        POISONS[poison](trainer)
    try:
        next(records)
    except NotFinite as error:
        return {"words": str(error), "is_echo": is_secondary_failure(error)}
    raise AssertionError("nothing was found")


SLOW = pytest.mark.slow
CASES = [
    (
        "loss",
        2,
        {"parallel__pp": 2, "cluster__gpus_per_node": 4},
        "the gradient norm of step 2 is nan: first on rank 2, its loss is nan, and its gradient of ",
    ),
    pytest.param("gradient", 1, {}, "first on rank 1, its gradient of final_norm", marks=SLOW),
    ("gradient", 1, {"parallel__zero": 3}, "first on rank 1, its gradient of final_norm.weight is not finite"),
    ("parameter", 1, {}, "first on rank 1, its parameter "),
    # a rank of a square whose loss is not the one that is counted
    pytest.param("loss", 1, grid("2d", 4), "first on rank 1, its loss is nan", marks=SLOW),
    pytest.param(
        "gradient",
        6,
        grid("3d", 8, training__micro_batch_size=4),
        "first on rank 6, its gradient of final_norm.weight",
        marks=SLOW,
    ),
]


@pytest.mark.parametrize(("poison", "rank", "changes", "words"), CASES)
@pytest.mark.quick(1)
def test_the_rank_it_came_from_is_named(
    data: Any, tmp_path: Path, poison: str, rank: int, changes: dict[str, Any], words: str
) -> None:
    job = tiny_job(data, **{"dp": 2, "training__steps": 3, **changes})
    raw = job.model_dump(mode="json")
    found = run_ranks(_poisoned_rank, job.world_size, raw, str(tmp_path), poison, rank)
    assert all(words in told["words"] for told in found), found
    assert [told["is_echo"] for told in found] == [other != rank for other in range(len(found))]
