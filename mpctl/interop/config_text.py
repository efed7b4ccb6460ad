"""Config files of launchers, YAML, JSON and Python: written from values by dotted name, and read
into them.

What is written is numbers, words, lists and tables, nothing that is run. What is read are words, as
those of a command line are, so that the readers of flags and of files are one. A file is untrusted:
it has at most MOST values and tables, and nothing in it is run.

>>> print(yaml_text(nested([("fsdp.reshard", True), ("fsdp.wrap", "NONE"), ("tp", 4)])))
fsdp:
  reshard: true
  wrap: NONE
tp: 4
>>> print(python_call("Plugin", {"tp_size": 4, "precision": "bf16"}))
Plugin(
    tp_size=4,
    precision="bf16",
)

>>> flat_values({"parallelism": {"tp": 2, "pp_engine": "1f1b"}, "bf16": True, "off": None})
{'bf16': ('true',), 'parallelism.tp': ('2',), 'parallelism.pp_engine': ('1f1b',)}
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from mpctl.core.errors import InputError

Flags = dict[str, tuple[str, ...]]
"""Flags of a command line, or values of a file by dotted name, each with its words."""
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
                values[f"{prefix}{key}"] = tuple(map(word, value[:MOST]))
            elif value is not None:
                values[f"{prefix}{key}"] = (word(value),)
        if max(len(values), len(tables)) > MOST:
            raise unreadable(f"a config of more than {MOST:,} values", "leave out what is not of the layout")
    return values


def word(value: object) -> str:
    """A value as a word of a command line: true and false in small letters."""
    return str(value).lower() if isinstance(value, bool) else str(value)[:1000]


def unreadable(message: str, hint: str = "give the launcher's config file as @FILE") -> InputError:
    """The error of a text that is no config of the launcher."""
    return InputError.of("bad-syntax", "--from", message[:200], hint)


def read_yaml(text: str) -> Flags:
    """The values of a YAML or JSON file. Raises InputError for what is neither."""
    import yaml  # only for such a file

    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise unreadable(f"no YAML or JSON: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise unreadable("the config is no table of settings")
    return flat_values(tree)


def python_calls(text: str) -> tuple[dict[str, object], dict[str, object]]:
    """The literals of Python source: keyword arguments by `Call.keyword`, and assigned values by
    name (`config.training.steps`). Nothing is run. Raises InputError for what is no Python."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise unreadable(f"no Python: {error}") from None
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


_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
_NOT_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


class Source(NamedTuple):
    """A Python expression that is written verbatim, such as `torch.bfloat16`: only from constants
    of this package, never from a job."""

    code: str


Scalar = int | float | str | bool | None
Value = Scalar | Source | tuple[str, ...] | list[int] | list[float] | list[str] | list[list[str]]
Tree = Mapping[str, "Value | Tree"]


def nested(values: Iterable[tuple[str, Value]]) -> dict[str, Any]:
    """Values by dotted name as tables of tables, in the order in which they come."""
    tree: dict[str, Any] = {}
    for name, value in values:
        table = tree
        *tables, key = name.split(".")
        for inner in tables:
            table = table.setdefault(inner, {})
        table[key] = value
    return tree


def yaml_text(tree: Tree) -> str:
    """Nested tables as YAML blocks, in the order given."""
    return "\n".join(_yaml_lines(tree, ""))


def _yaml_lines(tree: Tree, indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:" if value else f"{indent}{key}: {{}}"
            yield from _yaml_lines(value, f"{indent}  ")
        else:
            yield f"{indent}{key}: {_yaml_scalar(value)}"


def _yaml_scalar(value: Value) -> str:
    """A string is unquoted where YAML reads it as a string; a float has a point, as YAML 1.1
    requires."""
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and value.lower() not in _NOT_WORDS
        return value if is_plain else json.dumps(value)
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    return json.dumps(value)


def python_value(value: Value) -> str:
    """A literal, strings in double quotes; a Source is written verbatim.

    >>> python_value([1, 2]), python_value("a"), python_value(None), python_value(True)
    ('[1, 2]', '"a"', 'None', 'True')
    """
    if isinstance(value, Source):
        return value.code
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(python_value(part) for part in value)}]"
    return repr(value)


def python_call(name: str, arguments: Mapping[str, Value], indent: str = "") -> str:
    """A call with keyword arguments, one a line."""
    lines = [f"{indent}    {key}={python_value(value)}," for key, value in arguments.items()]
    return "\n".join([f"{name}(", *lines, f"{indent})"])
