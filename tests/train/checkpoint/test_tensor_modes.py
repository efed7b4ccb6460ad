"""A checkpoint of any mode of tensor parallelism continues in any other, on one process's curve.

float64, dropout on. The layout that saved did the first two of four steps. The loss of step 3 is
that of the saved values; the loss of step 4 would show moments that were lost. Without a training:
test_parts.py, and resharding through every mode in tests/train/weights/test_tensor_modes.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.states import checkpoint_bytes
from mpctl.records.checkpoint.manifest import read_manifest
from mpctl.records.checkpoint.tensor_header import read_header
from mpctl.records.checkpoint.verify import find_damage
from mpctl.spec.job import JobSpec
from tests.train.checkpoint.shards import shard_path
from tests.train.runtime.test_tensor_modes import GPT, LLAMA, grid
from tests.train.runtime.tiny import column, tiny_job, train

SAVING: dict[str, Any] = {"training__steps": 4, "checkpoint__interval": 2, "training__eval_samples": 0}
MODELS = {"gpt": {**GPT, **SAVING}, "llama": {**LLAMA, **SAVING}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "1d": {"tp": 2},
    "1d-dp": {"dp": 2, "parallel__zero": 1},
    "2d": grid("2d", 4),
    "2d-pp": grid("2d", 4, pp=2),
    "2.5d": grid("2.5d", 8),
    "2.5d-dp": grid("2.5d", 4, dp=2, parallel__zero=1),
    "3d": grid("3d", 8),
}
PAIRS = [
    ("gpt", "1d", "2d"),
    ("gpt", "2d", "1d"),
    ("gpt", "2d", "3d"),
    ("gpt", "3d", "2d"),
    ("gpt", "2.5d", "alone"),
    ("gpt", "3d", "1d-dp"),
    ("gpt", "2d-pp", "2.5d"),
    ("gpt", "2d", "2d"),
    ("llama", "2.5d", "3d"),
    ("llama", "3d", "2.5d"),
    ("llama", "2.5d-dp", "2d-pp"),
    ("llama", "1d", "2.5d-dp"),
    ("llama", "2d", "alone"),
]


class SavedRuns:
    """Trainings by model and layout, each done once, with a checkpoint after two steps."""

    def __init__(self, data: Path, root: Path) -> None:
        self.data, self.root = data, root
        self.done: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def job(self, model: str, layout: str) -> JobSpec:
        return tiny_job(self.data, **{**MODELS[model], **LAYOUTS[layout]})

    def ranks(self, model: str, layout: str) -> list[dict[str, Any]]:
        if (model, layout) not in self.done:
            run = self.root / f"{model}-{layout}"
            self.done[model, layout] = train(self.job(model, layout), run, timeout=200)
        return self.done[model, layout]

    def checkpoint(self, model: str, layout: str) -> Path:
        self.ranks(model, layout)
        return self.root / f"{model}-{layout}/checkpoints/step-2"


@pytest.fixture(scope="module")
def saved_runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> SavedRuns:
    return SavedRuns(data, tmp_path_factory.mktemp("saved-modes"))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("model", "saved", "resumed"), PAIRS)
def test_any_mode_continues_in_any_other(
    saved_runs: SavedRuns, tmp_path: Path, model: str, saved: str, resumed: str
) -> None:
    checkpoint = saved_runs.checkpoint(model, saved)
    shutil.copytree(checkpoint, tmp_path / "checkpoints/step-2")
    ranks = train(saved_runs.job(model, resumed), tmp_path, timeout=200)
    alone = saved_runs.ranks(model, "alone")
    assert column(ranks, "step") == [3, 4]
    for name in ("loss", "grad_norm"):
        assert column(ranks, name) == pytest.approx(column(alone, name)[2:], rel=1e-10)
    if saved == resumed:
        assert column(ranks) == column(saved_runs.ranks(model, saved))[2:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"), [("gpt", "2d"), *(("llama", layout) for layout in ("2.5d", "2.5d-dp", "3d", "2d-pp"))]
)
def test_a_checkpoint_has_its_planned_size(saved_runs: SavedRuns, model: str, layout: str) -> None:
    folder = saved_runs.checkpoint(model, layout)
    assert find_damage(folder) == []
    files = [read_header(shard_path(folder, k)) for k in range(len(read_manifest(folder).shards))]
    written = sum(header.bytes for file in files for header in file.values())
    assert written == checkpoint_bytes(JobLayout.of(saved_runs.job(model, layout)))
