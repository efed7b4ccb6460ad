"""The device that each test here runs on: a CPU always, a CUDA device where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.train.runtime.tiny import make_data

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """`cpu` or the first CUDA device."""
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files of the tiny job."""
    return make_data(tmp_path_factory.mktemp("data"))
