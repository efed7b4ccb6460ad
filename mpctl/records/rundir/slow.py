"""Ranks and links that hold up a run, as the launcher names them (run/launch/slow_parts.py): in
RUN/slow.jsonl, a line when one is named and a line when it is over, in status.json and
summary.json, and for launch.hook.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

MOST_LINES = 10_000


@dataclass(frozen=True)
class SlowPart:
    """Ranks that compute longer than their equals, or a link over which messages take longer.

    name: `rank 3 on host n2`. ranks: these, or those of the groups that use the link; hosts:
    theirs, in the order in which a message between two passes them; axis: of the groups, empty for
    ranks. ratio: how many times as long; since: the first slow step; named: the newest step when it
    was named; until: the newest step when it was over, None while it goes on. text: all of it as a
    sentence.
    """

    kind: Literal["ranks", "link"]
    name: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    axis: str
    ratio: float
    since: int
    named: int
    text: str
    until: int | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Identity of the part, the same from its first line to its last."""
        return self.kind, self.hosts, self.axis, self.ranks if self.kind == "ranks" else ()

    def as_dict(self) -> dict[str, Any]:
        document: dict[str, Any] = SLOW.dump_python(self, mode="json")
        return document


SLOW: TypeAdapter[SlowPart] = TypeAdapter(SlowPart)


def append_slow(path: Path, parts: Iterable[SlowPart]) -> None:
    """Add a line for each; a file that cannot be written is left as it is."""
    with suppress(OSError), path.open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(part.as_dict()) + "\n" for part in parts)


def read_slow(path: Path) -> Sequence[SlowPart]:
    """Every slow part that was named in a run, oldest first, as its last line has it; lines that
    are something else are skipped."""
    found: dict[tuple[object, ...], SlowPart] = {}
    for part in _parts(path):
        found[*part.key, part.since] = part
    return list(found.values())


def _parts(path: Path) -> Iterator[SlowPart]:
    with suppress(OSError), path.open("rb") as stream:
        for _, line in zip(range(MOST_LINES), stream, strict=False):
            with suppress(ValidationError):
                yield SLOW.validate_json(line)
