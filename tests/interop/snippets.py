"""What a Python snippet says, read from its syntax tree: nothing of it is run."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "recorded" / "launcher_fields.json"


def fields_of(software: str, name: str) -> set[str]:
    """The fields or arguments of a class, as recorded from the package."""
    record = json.loads(FILE.read_text("utf-8"))["fields"]
    (found,) = (classes for source, classes in record.items() if source.startswith(software))
    return set(found[name])


def value_of(node: ast.expr) -> Any:
    """A literal; the source of what is none, `torch.bfloat16`."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def calls_in(text: str) -> dict[str, dict[str, Any]]:
    """The keyword arguments of every call by name, `{"Plugin": {"tp_size": 4}}`."""
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return {
        ast.unparse(call.func): {word.arg: value_of(word.value) for word in call.keywords if word.arg} for call in calls
    }


def assigned_in(text: str) -> dict[str, Any]:
    """The assigned names and attributes with their values, `{"cfg.model.num_layers": 4}`."""
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign))
    return {ast.unparse(node.targets[0]): value_of(node.value) for node in nodes}
