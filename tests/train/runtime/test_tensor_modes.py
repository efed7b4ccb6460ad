"""Training with tensor parallelism in 2, 2.5 and 3 dimensions: the losses, the gradients and their
norm of one process, and every rank holds and sends what its plan says.

float64, so that equal means 1e-10; dropout on, which has to drop the same elements on every grid.
Two micro batches of 4 samples a step; 5 validation samples, which no grid cuts equally.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpctl.run.launch.summary import planned_traffic
from mpctl.spec.job import JobSpec
from tests.train.runtime.test_axes import SHAPES, same_copies, same_gradients
from tests.train.runtime.test_pipeline import whole_pipelines
from tests.train.runtime.tiny import column, tiny_job, tiny_plan, train

USUAL: dict[str, Any] = {
    "training__dtype": "fp64",
    "training__steps": 2,
    "training__eval_samples": 5,
    "training__micro_batch_size": 4,
    "checkpoint__at_end": False,
    "checkpoint__interval": 0,
    "parallel__bucket_bytes": 20_000,
}
GPT, LLAMA = {**USUAL}, {**USUAL, **SHAPES["llama"]}
# q = 3 divides a hidden size of 36, 6 heads, 3 of keys and values, 108 MLP columns
THREES = {
    "model__hidden": 36,
    "model__heads": 6,
    "model__ffn": 108,
    "training__micro_batch_size": 3,
    "training__global_batch_size": 6,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "llama": LLAMA,
    "gpt-threes": {**GPT, **THREES},
    "llama-threes": {**LLAMA, **THREES, "model__kv_heads": 3},
    "gpt-four": {**GPT, "model__layers": 4},
}
FULL, SELECTIVE = {"training__recompute": "full"}, {"training__recompute": "selective"}
OFFLOAD = {**FULL, "training__offload_activations": True}


def grid(mode: str, tp: int, *, dp: int = 1, pp: int = 1, **changes: Any) -> dict[str, Any]:
    """A layout of tp x dp x pp ranks."""
    return {
        "tp": tp,
        "dp": dp,
        "parallel__pp": pp,
        "cluster__gpus_per_node": tp * dp * pp,
        "parallel__tensor_mode": mode,
        **changes,
    }


CASES: dict[str, tuple[str, dict[str, Any]]] = {"gpt-2d": ("gpt", grid("2d", 4))}
SLOW_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2.5d": ("llama", grid("2.5d", 4, **FULL)),
    "llama-2d": ("llama", grid("2d", 4)),
    "gpt-2.5d": ("gpt", grid("2.5d", 4)),
    "gpt-2.5d-deep": ("gpt", grid("2.5d", 8)),
    "llama-2.5d-deep": ("llama", grid("2.5d", 8, parallel__tensor_depth=2, **SELECTIVE)),
    "gpt-3d": ("gpt", grid("3d", 8)),
    "llama-3d": ("llama", grid("3d", 8)),
    "gpt-2d-nine": ("gpt-threes", grid("2d", 9)),
    "llama-2d-nine": ("llama-threes", grid("2d", 9, **FULL)),
    "gpt-2d-full": ("gpt", grid("2d", 4, **FULL)),
    "llama-2d-selective": ("llama", grid("2d", 4, **SELECTIVE)),
    "gpt-2d-offload": ("gpt", grid("2d", 4, **OFFLOAD)),
    "gpt-3d-full": ("gpt", grid("3d", 8, **FULL)),
    "llama-3d-selective": ("llama", grid("3d", 8, **SELECTIVE)),
    "gpt-2d-gloo": ("gpt", grid("2d", 4, launch__shared_memory=False)),
    "llama-3d-gloo": ("llama", grid("3d", 8, launch__shared_memory=False)),
    **{f"gpt-2d-dp2-zero{z}": ("gpt", grid("2d", 4, dp=2, parallel__zero=z)) for z in range(4)},
    **{f"llama-2.5d-dp2-zero{z}": ("llama", grid("2.5d", 4, dp=2, parallel__zero=z)) for z in (1, 2, 3)},
    "llama-2.5d-deep-dp2": ("llama", grid("2.5d", 8, dp=2, parallel__zero=1)),
    "gpt-3d-dp2": ("gpt", grid("3d", 8, dp=2, parallel__zero=1)),
    "gpt-2d-pp2": ("gpt", grid("2d", 4, pp=2)),
    "llama-2d-pp2-gpipe": ("llama", grid("2d", 4, pp=2, parallel__schedule="gpipe", **FULL)),
    "gpt-2d-pp2-vpp2": ("gpt-four", grid("2d", 4, pp=2, parallel__vpp=2, parallel__schedule="interleaved")),
    "llama-2.5d-pp2": ("llama", grid("2.5d", 4, pp=2)),
    "gpt-3d-pp2": ("gpt", grid("3d", 8, pp=2)),
    "gpt-2d-order": ("gpt", grid("2d", 4, dp=2, parallel__order="dp-tp-cp-pp")),
    "gpt-2d-dp2-pp2-zero1": ("gpt", grid("2d", 4, dp=2, pp=2, parallel__zero=1)),
}


ALL = {**CASES, **SLOW_CASES}
CHOSEN = [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_CASES)]


class Trainings:
    """Trainings of one process by model, and of a grid by case, each done once."""

    def __init__(self, data: Path, root: Path) -> None:
        self.data, self.root = data, root
        self.done: dict[str, list[dict[str, Any]]] = {}

    def alone(self, model: str) -> list[dict[str, Any]]:
        return self._train(model, tiny_job(self.data, **MODELS[model]))

    def job(self, case: str) -> JobSpec:
        model, how = ALL[case]
        return tiny_job(self.data, **{**MODELS[model], **how})

    def ranks(self, case: str) -> list[dict[str, Any]]:
        return self._train(case, self.job(case))

    def _train(self, name: str, job: JobSpec) -> list[dict[str, Any]]:
        if name not in self.done:
            self.done[name] = train(job, self.root / name, timeout=200)
        return self.done[name]


@pytest.fixture(scope="module")
def trainings(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(data, tmp_path_factory.mktemp("modes"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CHOSEN)
def test_a_grid_trains_as_one_process(trainings: Trainings, case: str) -> None:
    ranks, alone = trainings.ranks(case), trainings.alone(ALL[case][0])
    for name in ("loss", "grad_norm"):
        assert column(ranks, name) == pytest.approx(column(alone, name), rel=1e-10)
    last = [found[0]["records"][-1]["validation_loss"] for found in (ranks, alone)]
    assert last[0] == pytest.approx(last[1], rel=1e-10)
    assert all(column([rank]) == column(ranks) for rank in ranks)
    model = trainings.job(case).model
    assert model is not None
    same_gradients(whole_pipelines(ranks), alone, vocab=model.vocab)
    same_copies(ranks)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CHOSEN)
def test_every_rank_holds_and_sends_what_the_plan_says(trainings: Trainings, case: str) -> None:
    job = trainings.job(case)
    estimate, samples = tiny_plan(job).estimate, job.training.eval_samples
    for rank in trainings.ranks(case):
        place = rank["coords"]
        assert rank["count"] == estimate.memory[place["pp"]].parameters
        assert rank["traffic"] == planned_traffic(estimate.messages[place["pp"]])
        planned = estimate.validation(place["pp"], place["dp"], [samples])
        assert rank["validation"]["traffic"] == planned_traffic(planned)
