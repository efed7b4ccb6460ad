"""RUN/nodes/blamed.json, schema mpctl.blamed/1: how many failures of a run each host is blamed for.

The launcher alone writes it, after each failure whose cause lies on one host (run/launch/diagnose.py).
It outlives restarts, requeues and resumptions. Whoever reads it expects any content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass as plain
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from mpctl.core.durable import write_whole

MOST_BYTES = 1 << 22
MOST_ERROR = 400
"""Characters of an error that are kept."""
HostName = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^\s\x00-\x1f]+$")]


@dataclass(frozen=True)
class HostBlame:
    """failures: that the host is blamed for, at least one; last: when the last one was, seconds
    since 1970; error: its words."""

    failures: Annotated[int, Ge(1), Le(10**9)]
    last: Annotated[float, Ge(0), Le(1e12)]
    error: Annotated[str, Field(max_length=MOST_ERROR)]


@dataclass(frozen=True)
class BlamedHosts:
    """The content of the file: the hosts by name."""

    hosts: Mapping[HostName, HostBlame] = field(default_factory=dict)
    schema: Literal["mpctl.blamed/1"] = "mpctl.blamed/1"

    def failures(self, host: str) -> int:
        """Return the number of failures blamed on a host."""
        blame = self.hosts.get(host)
        return blame.failures if blame else 0


BLAMED: TypeAdapter[BlamedHosts] = TypeAdapter(BlamedHosts)


def read_blamed(path: Path) -> BlamedHosts | None:
    """The content of a file, without hosts where there is none; None when it holds something
    else."""
    try:
        with path.open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
        return BLAMED.validate_json(content) if len(content) <= MOST_BYTES else None
    except FileNotFoundError:
        return BlamedHosts()
    except (OSError, ValidationError):
        return None


@plain
class BlameRecord:
    """The file of a run, for its launcher. most: failures after which a host is not used again,
    None for no limit; blamed: the content."""

    path: Path
    most: int | None = None
    blamed: BlamedHosts = field(default_factory=BlamedHosts)

    @classmethod
    def of(cls, path: Path, most: int | None) -> BlameRecord:
        """The record with what the file holds; a file of other content counts as none."""
        return cls(path, most, read_blamed(path) or BlamedHosts())

    def add(self, host: str, error: str, now: float) -> int:
        """Count a failure that a host is blamed for, and write the file. Returns how many it is
        blamed for now. Raises OSError where it cannot be written; it is counted anyway."""
        failures = self.blamed.failures(host) + 1
        blame = HostBlame(failures, now, error[:MOST_ERROR])
        self.blamed = BlamedHosts({**self.blamed.hosts, host: blame})
        write_whole(self.path, BLAMED.dump_json(self.blamed, indent=1).decode() + "\n")
        return failures

    def is_excluded(self, host: str) -> bool:
        """Whether a host is blamed for too many failures to be used again."""
        return self.most is not None and self.blamed.failures(host) >= self.most
