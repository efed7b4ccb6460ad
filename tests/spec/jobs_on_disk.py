"""Jobs as files for the tests of loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpctl.core.errors import InputError, Issue
from mpctl.spec.load import load_job

SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 100, "seq_length": 16}


def issues_of(source: str | None = None, **overrides: Any) -> dict[str, Issue]:
    """The issues of a bad job by setting; keyword `parallel__tp` stands for `parallel.tp`."""
    with pytest.raises(InputError) as caught:
        load_job(source, {key.replace("__", "."): value for key, value in overrides.items()})
    assert caught.value.exit_code == 2
    return {issue.where: issue for issue in caught.value.issues}


def write(path: Path, text: str) -> str:
    path.write_text(text, "utf-8")
    return str(path)
