"""What several benches train on."""

import pytest


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A folder of 24 texts of 400 words each."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(24):
        words = " ".join(f"word{(number * 7 + k) % 101}" for k in range(400))
        (folder / f"{number}.txt").write_text(words)
    return folder
