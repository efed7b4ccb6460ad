from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.runtime.tiny import STEPS, make_data, tiny_job, train


class Runs:
    """Trainings that several tests look at, each done once; `folder` is its run directory."""

    def __init__(self, data: Path, root: Path) -> None:
        self.data, self.root = data, root
        self.done: dict[str, list[dict[str, Any]]] = {}

    def folder(self, tp: int, dp: int, dtype: str = "fp32") -> Path:
        return self.root / f"{tp}x{dp}-{dtype}"

    def get(self, tp: int = 1, dp: int = 1, dtype: str = "fp32") -> list[dict[str, Any]]:
        folder = self.folder(tp, dp, dtype)
        if folder.name not in self.done:
            steps = 8 if dtype == "fp64" else STEPS
            job = tiny_job(self.data, tp, dp, training__dtype=dtype, training__steps=steps)
            self.done[folder.name] = train(job, folder)
        return self.done[folder.name]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("runtime-data"))


@pytest.fixture(scope="session")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(data, tmp_path_factory.mktemp("runtime-runs"))
