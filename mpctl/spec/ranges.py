"""Numbers of steps or batches from 1 as text: `17, 40-55`, ranges in rising order.

>>> rising_ranges("17, 40-55"), is_within("17, 40-55", 41), is_within("", 1)
([(17, 17), (40, 55)], True, False)
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError


def rising_ranges(text: str) -> list[tuple[int, int]]:
    """The ranges in `17, 40-55`, as (first, last); none in an empty text. Raises ValueError for
    other text, and where they overlap or do not rise."""
    ranges = []
    for part in text.split(",") if text.strip() else ():
        first, dash, last = part.partition("-")
        ranges.append((int(first), int(last if dash else first)))
    ends = [0, *(number for one in ranges for number in one)]
    if ends != sorted(ends) or any(a[1] >= b[0] for a, b in pairwise([(0, 0), *ranges])):
        raise ValueError(f"{text!r} is not in rising order")
    return ranges


def is_within(text: str, number: int) -> bool:
    """Whether a number lies in one of the ranges."""
    return any(first <= number <= last for first, last in rising_ranges(text))


def _require_batches(text: str) -> str:
    return _required(text, "batches")


def _require_steps(text: str) -> str:
    return _required(text, "steps")


def _required(text: str, what: str) -> str:
    try:
        rising_ranges(text)
    except ValueError:
        raise PydanticCustomError(
            "rising_ranges",
            "Input should be {what} in rising order such as '17, 40-55'",
            {"what": what},
        ) from None
    return text


BatchRanges = Annotated[str, AfterValidator(_require_batches)]
StepRanges = Annotated[str, AfterValidator(_require_steps)]
