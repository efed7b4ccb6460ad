"""Training by adapters: one curve, and exactly the planned messages and parameters, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpctl.run.launch.summary import planned_traffic
from mpctl.spec.job import JobSpec
from tests.train.runtime.test_axes import SHAPES, same_gradients
from tests.train.runtime.tiny import column, tiny_job, tiny_plan, train

LORA = {"rank": 4, "dropout": 0.1}
SP, FULL = {"parallel__sequence_parallel": True}, {"training__recompute": "full"}
DRY = {"training__dropout": 0.0, "training__attention_dropout": 0.0}
PP2 = {"parallel__pp": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2-sp-full": {"tp": 2, **SP, **FULL},
    "tp2-full-dry": {"tp": 2, **FULL, **DRY},
    "tp4-sp": {"tp": 4, **SP},
    "pp2": PP2,
    "zero-bubble-tp2-sp": {"tp": 2, **SP, **PP2, "parallel__schedule": "zero-bubble"},
    "cp2-full": {"parallel__cp": 2, **FULL},
    "tp2-sp-cp2": {"tp": 2, **SP, "parallel__cp": 2},
    "dp2-zero1": {"dp": 2, "parallel__zero": 1},
    "dp2-zero2": {"dp": 2, "parallel__zero": 2},
    "dp2-zero3": {"dp": 2, "parallel__zero": 3},
    "tp2-sp-dp2-zero3-full": {"tp": 2, "dp": 2, "parallel__zero": 3, **SP, **FULL},
}
QUICK = {("llama", "tp2"), ("llama", "tp2-sp-full"), ("llama", "pp2"), ("gpt", "cp2-full"), ("llama", "dp2-zero3")}
CASES = [
    pytest.param(shape, layout, marks=[pytest.mark.slow] * ((shape, layout) not in QUICK))
    for shape in ("llama", "gpt")
    for layout in LAYOUTS
]


def job_of(data: Path, shape: str, adapter: dict[str, Any], changes: dict[str, Any]) -> JobSpec:
    ranks = 1
    for axis in ("tp", "dp", "parallel__cp", "parallel__pp"):
        ranks *= changes.get(axis, 1)
    return tiny_job(
        data,
        **{"training__adapter": adapter, "training__dtype": "fp64", "training__steps": 4, "checkpoint__interval": 0},
        **{"checkpoint__at_end": False, "cluster__gpus_per_node": ranks, **SHAPES[shape], **changes},
    )


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory):
    """Trainings of one process, by their jobs' keys."""
    done: dict[str, list[dict[str, Any]]] = {}

    def trained(shape: str, adapter: dict[str, Any], changes: dict[str, Any]) -> list[dict[str, Any]]:
        key = repr((shape, adapter, changes))
        if key not in done:
            done[key] = train(job_of(data, shape, adapter, changes), tmp_path_factory.mktemp("alone"))
        return done[key]

    return trained


def compare(data: Path, folder: Path, alone, shape: str, adapter: dict[str, Any], changes: dict[str, Any]) -> None:
    """Losses, norms and gradients of a layout with those of one process; its messages and parameters
    with the plan; frozen parameters with their first values."""
    job = job_of(data, shape, adapter, changes)
    ranks = train(job, folder)
    dry = {key: changes[key] for key in changes if key in DRY}
    one = alone(shape, adapter, dry)
    for name in ("loss", "grad_norm"):
        assert column(ranks, name) == pytest.approx(column(one, name), rel=1e-10)
    estimate = tiny_plan(job).estimate
    for rank in ranks:
        stage = rank["coords"]["pp"]
        assert rank["count"] == estimate.memory[stage].parameters
        assert rank["traffic"] == planned_traffic(estimate.messages[stage])
    if job.parallel.pp == 1:
        same_gradients(ranks, one, vocab=job.model.vocab)


@pytest.mark.parametrize(("shape", "layout"), CASES)
@pytest.mark.quick(1)
def test_every_layout_trains_adapters_as_one_process(
    data: Path, tmp_path: Path, alone, shape: str, layout: str
) -> None:
    compare(data, tmp_path, alone, shape, LORA, LAYOUTS[layout])
