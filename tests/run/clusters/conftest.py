from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run.clusters.kubernetes.api_server import Cluster, served
from tests.run.launch.conftest import data, finished, nothing_is_left_running

__all__ = ["data", "finished", "kubernetes", "nothing_is_left_running"]


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster that the kubectl of this machine is configured for."""
    with served(tmp_path, monkeypatch) as cluster:
        yield cluster
