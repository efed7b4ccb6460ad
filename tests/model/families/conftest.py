"""`text`: a data set in which every token is another number."""

from __future__ import annotations

import pytest

from mpctl.train.data.indexed import IndexedDataset
from tests.model.families.family_samples import dataset


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    """Documents of 1 to 40 tokens, 3,000 tokens in all."""
    return dataset(tmp_path_factory.mktemp("objectives"), [3, 17, 1, 8, 40, 2, 29] * 30)
