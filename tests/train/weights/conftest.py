from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.runtime.tiny import make_data
from tests.train.weights.hub import Truth, truth


@pytest.fixture(scope="session")
def truths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Truth]:
    """Each kind's model, saved once; tests damage copies."""
    root, made = tmp_path_factory.mktemp("hub"), dict[str, Truth]()

    def get(kind: str) -> Truth:
        if kind not in made:
            made[kind] = truth(kind, root / kind)
        return made[kind]

    return get


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("weights-data"))
