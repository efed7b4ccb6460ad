"""Hostfiles: a line `host slots=N` for each host, as DeepSpeed and Open MPI write them.

Text from `#` to the end of a line is a comment, empty lines are ignored. The order of the lines is
the order of the plan's nodes: the first host is node 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mpctl.clusters.ssh.host_line import EXAMPLE, SshHost, parse_host
from mpctl.errors import Issue

MOST_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Hostfile:
    """The hosts of a hostfile in order, and everything that is wrong with it."""

    path: str
    hosts: tuple[SshHost, ...]
    issues: tuple[Issue, ...]


def read_hostfile(path: Path) -> Hostfile:
    """Read and parse a hostfile; a file that cannot be read is an issue like any other."""
    where = str(path)
    try:
        with path.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        hint = f"name a file with --hostfile; {EXAMPLE} for each host"
        return Hostfile(where, (), (Issue("hostfile", where, message, hint),))
    except UnicodeDecodeError:
        message = "is not a text file in UTF-8"
        return Hostfile(where, (), (Issue("hostfile", where, message, EXAMPLE),))
    if len(data) > MOST_BYTES:
        message = f"has more than {MOST_BYTES // 2**20} MiB, which no list of hosts has"
        return Hostfile(where, (), (Issue("hostfile", where, message, EXAMPLE),))
    return parse_hostfile(text, where)


def parse_hostfile(text: str, path: str) -> Hostfile:
    """Parse the text of a hostfile. path: the name of the file, for the issues' `FILE:LINE`."""
    hosts: list[SshHost] = []
    issues: list[Issue] = []
    first_lines: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        host = parse_host(line, f"{path}:{number}")
        if isinstance(host, list):
            issues += host
            continue
        first = first_lines.setdefault(host.name.lower(), host.where)
        if first == host.where:
            hosts.append(host)
        else:
            issues.append(_doubled(host, first))
    if not hosts and not issues:
        issues.append(Issue("hostfile", path, "names no host", EXAMPLE))
    return Hostfile(path, tuple(hosts), tuple(issues))


def _doubled(host: SshHost, first: str) -> Issue:
    message = f"{host.name} is already in line {first.rpartition(':')[2]}"
    hint = "name each host once, with all its slots in one line"
    return Issue("hostfile-doubled", host.where, message, hint)
