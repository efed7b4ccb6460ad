"""What is local to one host stays in launch/node/: a backend is a folder beside it."""

from __future__ import annotations

import ast
from pathlib import Path

import mpctl.launch.node

LAUNCH = Path(mpctl.launch.node.__file__).parent.parent
USED = {
    "address": set(),
    "cgroup": {"memory_kills"},
    "host": {"Device", "host_issues", "rehearsal_warnings"},
    "machine": {"Machine"},
    "processes": {"ProcessTree"},
    "torchrun": {"Attempt", "rank_environment", "task_environments", "torchrun_command"},
}


def test_the_rest_of_launch_uses_only_what_a_backend_would_offer() -> None:
    used: dict[str, set[str]] = {path.stem: set() for path in (LAUNCH / "node").glob("[a-z]*.py")}
    for path in LAUNCH.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "mpctl.launch.node"
            ):
                used[str(node.module).rpartition(".")[2]] |= {alias.name for alias in node.names}
    assert used == USED


def test_the_supervisor_starts_and_ends_no_process_itself() -> None:
    for name in ("supervise", "watch", "diagnose", "launch_plan", "preflight", "set_up"):
        text = (LAUNCH / f"{name}.py").read_text("utf-8")
        imported = {
            alias.name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert not {"subprocess", "socket"} & imported, name
