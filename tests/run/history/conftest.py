"""`call`: the command, called in this process."""

from __future__ import annotations

import pytest

from tests.cli.calls import Mpctl, caller


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Mpctl:
    """Call `call(*arguments)` and get its exit code, stdout and stderr."""
    return caller(capsys)
