"""Slurm's lists of nodes: `gpu[003-005,7],login1` names gpu003, gpu004, gpu005, gpu7 and login1.

A number in brackets keeps the zeros before it, and a range has the width of its first number. A
name may have several brackets, `rack[0-1]n[1-2]`; the last one counts fastest. This is what
`scontrol show hostnames` prints, without starting it: a launcher expands SLURM_JOB_NODELIST.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mpctl.errors import InputError

MOST_NODES = 65_536
"""Names in one list, at most; Slurm's own bound for a list (MAX_SLURM_NODES)."""
NAME = re.compile(r"(?:[^\s,\[\]]|\[[^\[\]]*\])+")
PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


def address_command(names: Sequence[str]) -> list[str]:
    """The command whose output `read_addresses` reads."""
    return ["sinfo", "--noheader", "--Node", f"--nodes={','.join(names)}", "--format=%N|%o"]


def read_addresses(listing: str) -> dict[str, str]:
    """The network address of each node by its name: NodeAddr of Slurm's configuration, by which
    Slurm itself reaches it. A name need not be one that hosts can resolve."""
    pairs = (line.partition("|") for line in listing.splitlines())
    return {name: address for name, between, address in pairs if between and address}


def expand_node_list(text: str) -> list[str]:
    """The names in a list of nodes, in its order. Raises InputError for text that is none, and for
    one of more than MOST_NODES names."""
    names: list[str] = []
    end = 0
    for match in NAME.finditer(text):
        _require(match.start() == end, text)
        names += _expand(match[0], text)
        _require_bound(len(names), text)
        end = match.end() + 1
        _require(match.end() == len(text) or text[match.end()] == ",", text)
    _require(bool(names) and not text.endswith(","), text)
    return names


def _expand(name: str, text: str) -> list[str]:
    """The names that one entry of a list stands for."""
    names = [""]
    for bracket, plain in PART.findall(name):
        endings = list(_numbers(bracket, text)) if not plain else [plain]
        _require_bound(len(names) * len(endings), text)
        names = [start + ending for start in names for ending in endings]
    return names


def _numbers(bracket: str, text: str) -> Iterator[str]:
    """`003-005,7` -> 003, 004, 005, 7."""
    for entry in bracket.split(","):
        match = RANGE.fullmatch(entry)
        if match is None:
            raise _unreadable(text)
        first, last = match[1], match[2] or match[1]
        _require(int(first) <= int(last), text)
        _require_bound(int(last) - int(first) + 1, text)
        width = len(first)
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(width)


def _require(is_right: bool, text: str) -> None:
    if not is_right:
        raise _unreadable(text)


def _require_bound(count: int, text: str) -> None:
    if count > MOST_NODES:
        message = f"{_short(text)} names more than {MOST_NODES:,} nodes"
        raise InputError.of("node-list-long", "node list", message, "name fewer nodes")


def _unreadable(text: str) -> InputError:
    message = f"{_short(text)} is not a list of nodes"
    return InputError.of("node-list", "node list", message, "write it as gpu[003-005,7],login1")


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
