"""A preset as TOML with comments: what a bench measured, in a file that `mpctl plan` reads.

Single values come first, then tables. Numbers have four significant digits, which is more than
measurements repeat to. By hand, {"name": "a", "intra_node": {"bandwidth": 1.53e9}} with the comment
{"intra_node.bandwidth": "64 MiB"}:

    name = "a"

    [intra_node]
    bandwidth = 1.53e+09  # 64 MiB
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpctl.calibrate.write import number

Comments = Mapping[str, str]  # by dotted path


def preset_text(table: Mapping[str, Any], *, head: Sequence[str], comments: Comments) -> str:
    """The table as TOML. head: lines of a comment at its beginning; comments: to the right of a
    value, by its dotted path. Values are texts, numbers, truth values and tables of those.

    >>> preset_text({"nodes": 1}, head=["measured"], comments={"nodes": "this one"})
    '# measured\\nnodes = 1  # this one\\n'
    """
    return "\n".join([*(f"# {line}" for line in head), *_lines(table, "", comments)]) + "\n"


def _lines(table: Mapping[str, Any], prefix: str, comments: Comments) -> Iterator[str]:
    values = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    for key, value in values.items():
        comment = comments.get(prefix + key)
        yield f"{key} = {_value(value)}" + (f"  # {comment}" if comment else "")
    for key, inner in table.items():
        if isinstance(inner, Mapping) and inner:
            yield ""
            yield f"[{prefix}{key}]"
            yield from _lines(inner, f"{prefix}{key}.", comments)


def _value(value: object) -> str:
    if isinstance(value, float):
        return number(value)
    return json.dumps(value, ensure_ascii=False)  # of texts, integers and truth values also TOML
