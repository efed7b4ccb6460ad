"""Values as YAML and as Python source: numbers, words, lists and tables, nothing that is run.

>>> print(yaml_text({"tp": 4, "fsdp": {"reshard": True, "wrap": "NONE"}}))
tp: 4
fsdp:
  reshard: true
  wrap: NONE
>>> print(python_call("Plugin", {"tp_size": 4, "precision": "bf16"}))
Plugin(
    tp_size=4,
    precision="bf16",
)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
_NOT_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


class Source(NamedTuple):
    """A Python expression that stands as it is, such as `torch.bfloat16`: from constants of this
    package alone, never from a job."""

    code: str


Scalar = int | float | str | bool | None
Value = Scalar | Source | list[int] | list[str] | list[list[str]]
Tree = Mapping[str, "Scalar | Tree"]


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


def _yaml_scalar(value: Scalar) -> str:
    """A string is plain where YAML reads nothing else in it; a float has a point, as YAML 1.1
    wants."""
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and value.lower() not in _NOT_WORDS
        return value if is_plain else json.dumps(value)
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    return json.dumps(value)


def python_value(value: Value) -> str:
    """A literal, strings in double quotes; a Source stands as it is.

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
