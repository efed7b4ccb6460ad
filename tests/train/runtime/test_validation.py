"""Validation: the same mean under every layout, by replicas that all do as much, as planned.

float64, so that equal means 1e-12; numbers of samples that do not divide by the replicas.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpctl.run.launch.summary import planned_traffic
from mpctl.spec.load import load_job
from mpctl.train.runtime.train import Trainer
from tests.train.runtime.test_axes import SHAPES
from tests.train.runtime.test_pipeline import MODELS, SEQUENCE, layout
from tests.train.runtime.tiny import make_trainer, settings, tiny_job, tiny_plan, train

ONE_STEP = {"training__steps": 1, "training__dtype": "fp64", "checkpoint__interval": 0, "checkpoint__at_end": False}
ODD = {"training__eval_samples": 5}  # by 2 replicas in micro batches of 2: 2 and 1, 2 and none
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gpt", layout(1, dp=3), {"parallel__zero": 3, "training__eval_samples": 8, "training__global_batch_size": 6}),
    ("gpt", layout(2, dp=2), {"parallel__zero": 1, **ODD}),
    ("llama", layout(2, dp=2), {"parallel__zero": 3, **ODD}),
]
SLOW_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gpt", layout(1, dp=3), {"parallel__zero": 3, "training__eval_samples": 1, "training__global_batch_size": 6}),
    ("gpt", layout(2, 2, dp=2), {"parallel__zero": 3, **ODD}),
    ("gpt", layout(2, tp=2, dp=2), {"parallel__zero": 3, **ODD, **SEQUENCE}),
    ("llama", layout(1, tp=4), {**ODD, "training__recompute": "full"}),
    ("bert", layout(1, cp=2, dp=2), {"parallel__zero": 3, **ODD}),
    ("glm", layout(2, dp=2, schedule="zero-bubble"), {"parallel__zero": 2, **ODD}),
    ("t5", layout(2, 2, tp=2, dp=2), {"parallel__zero": 3, **ODD, **SEQUENCE}),
    ("t5", layout(1, cp=2, dp=2), {"parallel__zero": 3, **ODD, "training__freeze": ["embedding.*", "encoder.*"]}),
]


@pytest.mark.parametrize(
    ("model", "how", "changes"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)]
)
@pytest.mark.quick(1)
def test_the_mean_does_not_tell_and_the_plan_is_what_runs(
    data: Path, tmp_path: Path, model: str, how: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Two corpora of one text, the second by name."""
    common = {**MODELS[model], **ONE_STEP, "data__validation": {"again": str(data)}}
    job = tiny_job(data, **{**common, **how, **changes})
    alone = {k: v for k, v in changes.items() if k.startswith("training")}
    ranks = train(job, tmp_path / "ranks")
    (one,) = list(make_trainer(tiny_job(data, **common, **alone), tmp_path / "one").run())
    estimate = tiny_plan(job).estimate
    for rank in ranks:
        (record,) = rank["records"]
        assert record["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-12)
        assert record["validation_losses"]["again"] == record["validation_loss"]
        found, samples = rank["validation"], job.training.eval_samples
        assert found["samples"] == [samples, samples]
        place = rank["coords"]
        planned = estimate.validation(place["pp"], place["dp"], [samples, samples])
        assert found["traffic"] == planned_traffic(planned) != {}


def test_messages_by_hand() -> None:
    """5 samples, dp 2, micro batches of 2, tp 2, 2 layers, fp32: replica 0 computes 2 and 1
    samples, replica 1 2 and one that does not count."""
    changes = {"training__eval_samples": 5, "cluster__gpus_per_node": 4, "parallel__zero": 3}
    job = load_job(None, settings(2, 2, **changes))
    estimate = tiny_plan(job).estimate
    traffic = [planned_traffic(estimate.validation(0, replica, [5])) for replica in (0, 1)]
    assert traffic[0] == traffic[1]
    s, h, width, words, reductions = 32, 32, 4, 3, 1 + 2 * 2  # embedding, two in each layer
    rows = 2 + 1
    assert traffic[0]["tp all_reduce"] == {
        "count": 2 * (reductions + 3),
        "bytes": rows * s * width * (reductions * h + words),
    }
    parameters = sum(m.bytes * m.count for m in estimate.messages[0] if m.what == "parameters") // (
        2 * job.num_microbatches
    )  # a step gathers forward and backward
    assert traffic[0]["dp_cp all_gather"]["bytes"] == 2 * parameters
    assert traffic[0]["world all_reduce"] == {"count": 1, "bytes": (2 + 4) * 8}


def test_a_failed_validation_loses_no_training(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step, and one in between, are saved and on record."""

    def failing(trainer: Trainer) -> dict[str, Any]:
        if trainer.step == at:
            raise RuntimeError("no validation")
        return {}

    monkeypatch.setattr(Trainer, "validate", failing)
    for at in (2, 4):
        changes = {"training__steps": 4, "checkpoint__interval": 2, "training__eval_interval": 2, **SHAPES["gpt"]}
        trainer, steps = make_trainer(tiny_job(data, **changes), tmp_path / str(at)), list[int]()
        with pytest.raises(RuntimeError, match="no validation"):
            for record in trainer.run():
                steps.append(record["step"])
        assert steps == list(range(1, at + 1))
        assert trainer.saver.saved == set(range(2, at + 1, 2))
