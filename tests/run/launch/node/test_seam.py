"""The supervisor and the diagnosis of an attempt know no host."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mpctl.run.launch

LAUNCH = Path(mpctl.run.launch.__file__).parent
PER_HOST = {"processes", "network", "agent"}
SEAM = ("attempt", "supervise", "watch", "verdict", "diagnose", "summary", "set_up")


def _imports(path: Path) -> set[str]:
    """The modules that a file imports while it runs; imports for types alone do not count."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    froms = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    plain = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
    named = {alias.name for node in plain for alias in node.names}
    return named | {str(node.module) for node in froms}


@pytest.mark.parametrize("name", SEAM)
def test_supervision_and_diagnosis_know_no_host(name: str) -> None:
    """They import no control channel and no process of a host."""
    imported = _imports(LAUNCH / f"{name}.py")
    assert not {"subprocess", "socket"} & imported
    assert not {module for module in imported if ".control" in module}
    per_host = {f"mpctl.run.launch.node.{part}" for part in PER_HOST}
    assert not per_host & imported
