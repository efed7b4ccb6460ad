"""A plan as another launcher's flags, file or snippet: one value, the same for every target.

By hand: notes ("dp 2 is derived",), body "tp: 4" and language yaml are the text

    # dp 2 is derived
    tp: 4
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypedDict

from mpctl.errors import Issue
from mpctl.planning.plan import Plan

WIDTH = 98
Language = Literal["shell", "yaml", "python"]


class EmitDocument(TypedDict):
    """Schema mpctl.emit/1: what `mpctl plan --emit TARGET --json` prints.

    language: of the text, in all of which a comment begins with `#`. notes: the comments at its
    head, one by one.
    """

    schema: Literal["mpctl.emit/1"]
    target: str
    software: str
    language: Language
    text: str
    notes: list[str]


@dataclass(frozen=True, slots=True)
class EmittedPlan:
    """What another launcher takes for a plan.

    target: its name, `megatron`. software: name and version that the spelling was checked with.
    notes: what a reader must know: derived sizes, approximations. body: flags, file or snippet.
    """

    target: str
    software: str
    language: Language
    notes: tuple[str, ...]
    body: str

    @property
    def text(self) -> str:
        """The notes as comments, each wrapped with its later lines set in, then the body."""
        return "\n".join([*map(_comment, (f"For {self.software}.", *self.notes)), self.body])

    def as_dict(self) -> EmitDocument:
        """The document of `--json`."""
        return {
            "schema": "mpctl.emit/1",
            "target": self.target,
            "software": self.software,
            "language": self.language,
            "text": self.text,
            "notes": list(self.notes),
        }


def _comment(note: str) -> str:
    """A note may hold names from a job file: what could end the comment becomes a space."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in note).split())
    return textwrap.fill(
        plain, WIDTH, initial_indent="# ", subsequent_indent="#   ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class EmitTarget:
    """One launcher that plans can be written for; a new one starts with a row in registry.py.

    refusals: what it cannot say of a plan, as issues. notes: its comments on a plan that it can
    say; body: the text.
    """

    name: str
    software: str
    language: Language
    refusals: Callable[[Plan], Iterator[Issue]]
    notes: Callable[[Plan], Iterator[str]]
    body: Callable[[Plan], str]
