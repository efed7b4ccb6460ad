"""A rule's answer, and the words that rules share."""

from __future__ import annotations

from dataclasses import dataclass

from mpctl.errors import Issue, Status
from mpctl.sharding import divisors


@dataclass(frozen=True, slots=True)
class Check:
    """The answer of one rule: ok, worth a warning, or an error with a way out."""

    rule: str
    status: Status
    where: str
    message: str
    hint: str = ""

    @property
    def issue(self) -> Issue:
        return Issue(self.rule, self.where, self.message, self.hint)


def listed(numbers: list[int]) -> str:
    """`[1, 2, 3]` -> `1, 2 or 3`."""
    words = [str(number) for number in numbers]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def divides(rule: str, where: str, size: int, by: int, noun: str, ways: str = "") -> Check:
    """The plain rule: `by` divides `size`."""
    if size % by == 0:
        return Check(rule, "ok", where, f"{by} divides {size} {noun}")
    legal = listed([k for k in divisors(size) if k <= max(64, by)])
    hint = ways or f"use {legal}"
    return Check(rule, "error", where, f"{by} does not divide {size} {noun}", hint)


def nearest(legal: list[int], value: int) -> list[int]:
    """The three legal values nearest to the one given, ascending."""
    return sorted(sorted(legal, key=lambda k: abs(k - value))[:3])
