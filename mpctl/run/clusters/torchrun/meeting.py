"""RUN/nodes/meeting.json, schema mpctl.meeting/1: where the launcher of a joined world is reached.

The processes of a joined world know only the run directory and their numbers. The first one becomes
the launcher and writes the file; the others read it until they are connected. A file of an earlier
launch names a port at which nobody answers, or a peer that does not know the key
(control/messages.py), and the reader tries again.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from mpctl.core.durable import refresh, write_whole
from mpctl.run.hosts.network import addresses_towards, own_addresses

MEETING_SCHEMA: Literal["mpctl.meeting/1"] = "mpctl.meeting/1"
LOOPBACK = "127.0.0.1"
ADDRESS_VARIABLES = ("PET_MASTER_ADDR", "MASTER_ADDR")
"""Environment variables in which other programs name the host of the first process."""


class Meeting(BaseModel):
    """Address of the launcher. The file is parsed as untrusted input.

    host: its name; addresses: of that host, the likeliest first; key: name of the file next to this
    one that every process reads; time: seconds since 1970 when it was written.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    host: str
    addresses: tuple[str, ...]
    port: int
    key: str
    time: float

    @classmethod
    def here(cls, port: int, key: Path, environment: Mapping[str, str]) -> Meeting:
        """A launcher on this host."""
        host = socket.gethostname()
        addresses = dict.fromkeys([*own_addresses(), *_named(environment), host])
        return cls(host=host, addresses=tuple(addresses), port=port, key=key.name, time=time.time())

    @property
    def reachable(self) -> Iterator[str]:
        """Addresses to try from this host: the loopback first where the launcher is here."""
        if self.host == socket.gethostname():
            yield LOOPBACK
        yield from self.addresses


def listening_addresses(nodes: int, environment: Mapping[str, str]) -> list[str]:
    """Return the addresses of this host, the first of a joined world on so many hosts, for its processes; empty if
    unknown."""
    if nodes == 1:
        return [LOOPBACK]
    towards = addresses_towards(_named(environment)[:1])
    return [LOOPBACK, *towards] if towards and not ip_address(towards[0]).is_loopback else []


def _named(environment: Mapping[str, str]) -> list[str]:
    return [environment[name] for name in ADDRESS_VARIABLES if environment.get(name)]


def write_meeting(path: Path, meeting: Meeting) -> None:
    """Write the file. Raises OSError."""
    write_whole(path, json.dumps({"schema": MEETING_SCHEMA, **meeting.model_dump()}) + "\n")


def read_meeting(path: Path) -> Meeting | None:
    """Read the meeting in a file; None if there is none, or the file is broken."""
    refresh(path.parent)
    try:
        return Meeting.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
