"""A config file of a launcher as flags: a dotted name for each value, `parallelism.tp`.

The values are words, as those of a command line are, so that the readers of flags and of files are
one. A file is untrusted: it has at most MOST values and tables, and nothing in it is run.

>>> flat_values({"parallelism": {"tp": 2, "pp_engine": "1f1b"}, "bf16": True, "off": None})
{'bf16': ('true',), 'parallelism.tp': ('2',), 'parallelism.pp_engine': ('1f1b',)}
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from mpctl.core.errors import InputError
from mpctl.interop.command_line import Flags

MOST = 5_000


def flat_values(tree: Mapping[str, Any]) -> Flags:
    """The values of nested tables. Numbers are as written, true and false in small letters, a list
    is one word for each of its elements; null is left out. Raises InputError for too many."""
    values: Flags = {}
    tables = [("", tree)]
    for prefix, table in tables:  # which grows meanwhile, and without end where one holds itself
        for key, value in table.items():
            if isinstance(value, Mapping):
                tables.append((f"{prefix}{key}.", value))
            elif isinstance(value, list | tuple):
                values[f"{prefix}{key}"] = tuple(map(_word, value[:MOST]))
            elif value is not None:
                values[f"{prefix}{key}"] = (_word(value),)
        if max(len(values), len(tables)) > MOST:
            raise InputError.of(
                "bad-syntax", "--from", f"a config of more than {MOST:,} values", "leave out what is not of the layout"
            )
    return values


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)[:1000]


def read_yaml(text: str) -> Flags:
    """The values of a YAML or JSON file. Raises InputError for what is neither."""
    import yaml  # only for such a file

    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        said = " ".join(str(error).split())[:200]
        raise InputError.of(
            "bad-syntax", "--from", f"no YAML or JSON: {said}", "give the launcher's config file as @FILE"
        ) from None
    if not isinstance(tree, dict):
        raise InputError.of(
            "bad-syntax", "--from", "the config is no table of settings", "give the launcher's config file as @FILE"
        )
    return flat_values(tree)


def python_calls(text: str) -> tuple[dict[str, object], dict[str, object]]:
    """The literals of Python source: keyword arguments by `Call.keyword`, and assigned values by
    name (`config.training.steps`). Nothing is run. Raises InputError for what is no Python."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError.of(
            "bad-syntax", "--from", f"no Python: {error}"[:200], "give the launcher's config file as @FILE"
        ) from None
    calls: dict[str, object] = {}
    assigned: dict[str, object] = {}
    for node in nodes:
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            calls |= {f"{name}.{word.arg}": _literal(word.value) for word in node.keywords}
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            name, literal = ast.unparse(node.targets[0]), _literal(node.value)
            assigned[name] = ast.unparse(node.value) if literal is None else literal
    return {name: value for name, value in calls.items() if value is not None}, assigned


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return None


def is_true(word: str) -> bool:
    """Whether a word of a config says yes: `true`, `True`, `1`, or a flag without a value."""
    return word.lower() in ("", "true", "1", "yes", "on")
