"""What a pass over a corpus met beside its texts: what it passed over, and what is wrong.

Equal faults become one issue with their count, however many lines or files have them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpctl.errors import Issue

FIRST_NAMES = 5
MOST_ISSUES = 20
MOST_KEYS = 12
# Why a file, a folder or a text is passed over.
REASONS = {
    "empty": "empty",
    "binary": "binary, or not text in this encoding",
    "hidden": "hidden",
    "special": "not a regular file, or a broken link",
    "beyond-max-bytes": "beyond the limit of bytes",
    "blank": "blank",
}


@dataclass
class Tally:
    """How often something occurred, in how many files, and the first of their names."""

    count: int = 0
    files: int = 0
    first: list[str] = field(default_factory=list)
    last: str | None = None

    def add(self, name: str, count: int = 1) -> None:
        """All that occurs in one file is added before anything of the next."""
        self.count += count
        self.files += name != self.last
        self.last = name
        if len(self.first) < FIRST_NAMES and name not in self.first:
            self.first.append(name)

    def as_dict(self) -> dict[str, Any]:
        """The tally as a manifest holds it."""
        return {"count": self.count, "files": self.files, "first": self.first}


@dataclass
class Findings:
    """Filled while sources are searched and read.

    bytes: of the files, unpacked. skipped: by a key of REASONS. undecodable: characters U+FFFD that
    stand for bytes which are not in the encoding. lacking: records without the key of their text;
    keys: those that these records have. malformed: lines that hold no JSON object.
    """

    text_key: str = "text"
    bytes: int = 0
    skipped: dict[str, Tally] = field(default_factory=dict)
    undecodable: Tally = field(default_factory=Tally)
    lacking: Tally = field(default_factory=Tally)
    keys: Counter[str] = field(default_factory=Counter)
    malformed: Tally = field(default_factory=Tally)
    others: list[Issue] = field(default_factory=list)

    def skip(self, reason: str, name: str) -> None:
        """Note that the file or text of this name was passed over, for one of REASONS."""
        assert reason in REASONS
        self.skipped.setdefault(reason, Tally()).add(name)

    def lack(self, place: str, keys: Iterable[str], count: int = 1) -> None:
        """`count` records from `place` on have no text under the key; `keys` are what they have."""
        self.lacking.add(place, count)
        for key in keys:
            if key in self.keys or len(self.keys) < MOST_KEYS:
                self.keys[key] += count

    def unreadable(self, path: Path, error: Exception) -> None:
        """Note that a file could not be read, which fails the whole corpus in the end."""
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        hint = "check its permissions, or fetch it again"
        self.others.append(Issue("corpus-unreadable", str(path), f"not readable: {why}", hint))

    @property
    def issues(self) -> list[Issue]:
        """Everything that is wrong, a kind of fault once."""
        found = self.others[:MOST_ISSUES]
        if (rest := len(self.others) - MOST_ISSUES) > 0:
            message = f"{_count(rest, 'more file')} cannot be read"
            found.append(Issue("corpus-unreadable", "data.sources", message, "mend those first"))
        if self.malformed.count:
            message = f"{_count(self.malformed.count, 'line')} without a JSON object: "
            hint = f'write one {{"{self.text_key}": "..."}} a line'
            found.append(Issue("corpus-jsonl", "data.sources", message + _first(self.malformed),
                               hint))  # fmt: skip
        if self.lacking.count:
            found.append(self._lacking_issue())
        return found

    def _lacking_issue(self) -> Issue:
        keys = ", ".join(key for key, _ in self.keys.most_common()) or "none"
        message = f"{_count(self.lacking.count, 'record')} without a string under "
        message += f'"{self.text_key}": {_first(self.lacking)}; keys there: {keys}'
        hint = "name the key of the text: --text-key, data.text_key in a job"
        return Issue("corpus-text-key", "data.text_key", message, hint)

    def report(self) -> dict[str, Any]:
        """What was passed over and what could not be decoded, for a manifest."""
        skipped = {reason: tally.as_dict() for reason, tally in sorted(self.skipped.items())}
        return {"skipped": skipped, "undecodable": self.undecodable.as_dict()}


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _first(tally: Tally) -> str:
    """Names of the first places; `...` where there are more."""
    return ", ".join(tally.first) + (" ..." if tally.files > len(tally.first) else "")
