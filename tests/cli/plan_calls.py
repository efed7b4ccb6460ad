"""The plan of the golden case, as the tests of `mpctl plan` call it."""

from __future__ import annotations

from typing import Any

from tests.cli.calls import Said

GOLDEN = ("plan", "--nodes", 2, "--gpus-per-node", 8, "--tp", 2, "--pp", 4)


def document(said: Said) -> Any:
    assert said.code == 0, said.err
    assert said.err == ""
    return said.document
