"""Errors that a user can act on: each issue names the value, its bound and a fix.

MpctlError                 exit code 1 unless a subclass says otherwise
|- InputError              exit code 2: carries every Issue found, not the first one
|  '- DoesNotFit           exit code 3: legal, but needs more memory than the devices have
'- RunFailed               exit code 1: a worker died or a bench did not finish

Exit code 4: a gate of `mpctl compare --fail-if` failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, TypeVar

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

MOST_OF_A_RULE = 10
DOES_NOT_FIT, GATE_FAILED = 3, 4  # exit codes
Status = Literal["ok", "warning", "error"]
Result = TypeVar("Result")


class IssueEntry(TypedDict):
    """An issue in a JSON document."""

    rule: str
    where: str
    message: str
    hint: str


class ErrorDocument(TypedDict):
    """Schema mpctl.error/1: why a command given `--json` did nothing."""

    schema: Literal["mpctl.error/1"]
    issues: list[IssueEntry]


class Issue(NamedTuple):
    """One fault of the input.

    rule: a stable id to search for, `tp-divides-heads`; where: the setting, `parallel.tp`;
    message: value and bound in words; hint: a legal value.
    """

    rule: str
    where: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        way_out = f" ({self.hint})" if self.hint else ""
        return f"{self.where}: {self.message}{way_out}"

    def as_dict(self) -> IssueEntry:
        """The issue as an entry of a JSON document."""
        return {"rule": self.rule, "where": self.where, "message": self.message, "hint": self.hint}


class Offer(NamedTuple):
    """Values of one setting, each of which would make the input legal.

    noun: the word before the values in a hint, `tp`. near: the wrong value; the values nearest to
    it are offered first. also: settings that have to change together with this one.
    """

    setting: str
    values: tuple[int | str, ...]
    noun: str = ""
    near: int | None = None
    also: tuple[tuple[str, object], ...] = ()
    suffix: str = ""

    @property
    def by_nearness(self) -> list[int | str]:
        """The values; where the wrong value is known, the nearest to it come first."""
        near = self.near
        if near is None:
            return list(self.values)
        return sorted(self.values, key=lambda value: abs(int(value) - near))


class MpctlError(Exception):
    """Base of every error that mpctl raises on purpose."""

    exit_code = 1


class InputError(MpctlError):
    """The specification, a flag or a file is bad; holds all issues at once."""

    exit_code = 2

    def __init__(self, issues: Iterable[Issue]) -> None:
        self.issues = capped(issues)
        super().__init__("\n".join(str(issue) for issue in self.issues))

    @classmethod
    def of(cls, rule: str, where: str, message: str, hint: str = "") -> InputError:
        """Return an error of a single issue with these fields."""
        return cls([Issue(rule, where, message, hint)])


def attempt(issues: list[Issue], read: Callable[[], Result]) -> Result | None:
    """The result of `read`; if it raises InputError, None, and its issues are added to `issues`, so
    that all are reported together."""
    try:
        return read()
    except InputError as error:
        issues += error.issues
        return None


def capped(issues: Iterable[Issue]) -> tuple[Issue, ...]:
    """The issues, at most MOST_OF_A_RULE of each rule; the last one shown counts the rest.

    By hand, 1,000 missing tensors are 10 issues, and the tenth ends "(and 990 more like this)".
    """
    counts: Counter[str] = Counter()
    kept: list[Issue] = []
    for issue in issues:
        counts[issue.rule] += 1
        if counts[issue.rule] <= MOST_OF_A_RULE:
            kept.append(issue)
    last = {issue.rule: place for place, issue in enumerate(kept)}
    for rule, count in counts.items():
        if count > MOST_OF_A_RULE:
            words = f"{kept[last[rule]].message} (and {count - MOST_OF_A_RULE:,} more like this)"
            kept[last[rule]] = kept[last[rule]]._replace(message=words)
    return tuple(kept)


class DoesNotFit(InputError):
    """The job is legal, but no device has the memory for it."""

    exit_code = DOES_NOT_FIT


class RunFailed(MpctlError):
    """Work that had started did not finish. is_secondary: whether the cause is another process's
    failure."""

    is_secondary: bool = False
