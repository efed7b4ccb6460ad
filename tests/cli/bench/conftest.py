"""What benches train on."""

import pytest

from tests.measure.bench.small_jobs import write_texts


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A folder of short texts."""
    return write_texts(tmp_path_factory.mktemp("texts"))
