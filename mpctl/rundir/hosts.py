"""RUN/nodes/hosts.json, schema mpctl.hosts/1: the host of every rank of an attempt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

from mpctl.durable import write_whole


class RanksOfHost(TypedDict):
    """Consecutive ranks: the number of the first, and how many."""

    first: int
    count: int


class HostEntry(TypedDict):
    """The ranks of one host. node: its index in the plan; host: its name."""

    node: int
    host: str
    ranks: RanksOfHost


class HostsDocument(TypedDict):
    """The content of the file, a host each, in the order of the plan's nodes."""

    schema: Literal["mpctl.hosts/1"]
    hosts: list[HostEntry]


def write_hosts(path: Path, names: Sequence[str], ranks: int) -> None:
    """Write the file for hosts with these names and so many ranks on each. Raises OSError."""
    hosts: list[HostEntry] = [
        {"node": node, "host": name, "ranks": {"first": node * ranks, "count": ranks}}
        for node, name in enumerate(names)
    ]
    document: HostsDocument = {"schema": "mpctl.hosts/1", "hosts": hosts}
    write_whole(path, json.dumps(document, indent=1) + "\n")
