"""A rule's answer, and the wording that rules share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpctl.core.errors import Issue, Offer, Status
from mpctl.core.sharding import divisors


class Check(NamedTuple):
    """The answer of one rule about a job: ok, a warning, or an error with a way out.

    rule: its stable id, `tp-divides-heads`; where: the setting, `parallel.tp`; message: value and
    bound in words. hint: the way out in words; where values of settings are offered, it is built
    from `offers` and `more`, without the values that other rules refuse (validate.py).
    """

    rule: str
    status: Status
    where: str
    message: str
    hint: str = ""
    offers: tuple[Offer, ...] = ()
    more: str = ""

    @property
    def issue(self) -> Issue:
        """The check as an issue of an InputError."""
        return Issue(self.rule, self.where, self.message, self.hint)


MOST_OFFERED = 3  # most values that a hint names of an offer that has a nearest value


def refusal(rule: str, where: str, message: str, *offers: Offer, more: str = "") -> Check:
    """An error with values that fix it; more: other ways out, in words."""
    return Check(rule, "error", where, message, way_out(offers, more), offers, more)


def way_out(offers: Iterable[Offer], more: str = "") -> str:
    """`use tp 1, 2 or 4; or pp 3; or ...` from the offers that have values."""
    ways = []
    for offer in offers:
        shown = offer.by_nearness[: MOST_OFFERED if offer.near is not None else None]
        ordered = [value for value in offer.values if value in shown]
        ways += [f"{offer.noun} {listed(ordered)}{offer.suffix}".strip()] if ordered else []
    text = "; or ".join([*ways, *([more] if more else [])])
    return f"use {text}" if ways else text


def listed(values: Sequence[int | str]) -> str:
    """`[1, 2, 3]` -> `1, 2 or 3`."""
    words = [str(value) for value in values]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def divides(rule: str, where: str, size: int, by: int, noun: str, ways: str = "") -> Check:
    """The check that `by`, the value of the setting `where`, divides `size`.

    ways: the way out in words, where another setting must change; else the divisors are offered.
    """
    if size % by == 0:
        return Check(rule, "ok", where, f"{by} divides {size} {noun}")
    message = f"{by} does not divide {size} {noun}"
    if ways:
        return Check(rule, "error", where, message, ways)
    legal = tuple(k for k in divisors(size) if k <= max(64, by))
    return refusal(rule, where, message, Offer(where, legal))
