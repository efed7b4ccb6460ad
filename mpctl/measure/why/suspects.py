"""A suspect: a cause with the seconds that it may explain, and the evidence for it."""

from __future__ import annotations

from typing import NamedTuple

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.measure.why.causes import CAUSES
from mpctl.measure.why.observed import Observed
from mpctl.measure.why.planned import Planned
from mpctl.measure.why.series import Shape


class RunFacts(NamedTuple):
    """What suspects are found in. gap: seconds by which the run at its best is longer than planned, 0
    inside the plan's band."""

    observed: Observed
    planned: Planned
    shape: Shape

    @property
    def is_slow(self) -> bool:
        """Whether the run at its best is above the band."""
        return self.shape.base > self.planned.time.high

    @property
    def gap(self) -> float:
        return self.shape.base - self.planned.time.total if self.is_slow else 0.0


class SuspectEntry(TypedDict):
    """cause: a key of CAUSES. signature: the form in which it shows. seconds: of a step that it
    explains; None where neither log nor plan tells. check: what to type, the likeliest first."""

    cause: str
    signature: str
    words: str
    seconds: float | None
    evidence: str
    check: list[str]


class Suspect(NamedTuple):
    """weight: how likely it is among those of its signature. is_direct: the log itself names it."""

    signature: str
    cause: str
    seconds: float | None
    evidence: str
    weight: float = 1.0
    is_direct: bool = False

    def entry(self) -> SuspectEntry:
        cause = CAUSES[self.cause]
        return {
            "cause": self.cause,
            "signature": self.signature,
            "words": cause.words,
            "seconds": self.seconds,
            "evidence": self.evidence,
            "check": list(cause.checks),
        }
