from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.runtime.conftest import Runs
from tests.train.runtime.tiny import make_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("checkpoint-data"))


@pytest.fixture(scope="session")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(data, tmp_path_factory.mktemp("checkpoint-runs"))
