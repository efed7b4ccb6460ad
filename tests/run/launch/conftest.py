from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run.launch.command import Launched, end_all, launch
from tests.train.runtime.tiny import make_data


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("launch-data"))


@pytest.fixture(scope="session")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """20 steps on tp 2, checkpoints after 10 and 20, in a directory whose name has spaces."""
    run_dir = tmp_path_factory.mktemp("launch") / "a run"
    run = launch(data, run_dir, "--tp", "2", "--json").ended()
    assert run.process.returncode == 0, run.stderr  # else each test that compares with it fails for reasons of its own
    return run
