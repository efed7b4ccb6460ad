"""Errors that a user can act on: each issue names the value, its bound and a way out.

MpctlError                 exit code 1 unless a subclass says otherwise
|- InputError              exit code 2: carries every Issue found, not the first one
'- RunFailed               exit code 1: a worker died or a bench did not finish
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Issue:
    """One thing that is wrong with the input.

    rule: a stable id to search for, `tp-divides-heads`; where: the setting, `parallel.tp`;
    message: value and bound in words; hint: what would be legal.
    """

    rule: str
    where: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        way_out = f" ({self.hint})" if self.hint else ""
        return f"{self.where}: {self.message}{way_out}"

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


class MpctlError(Exception):
    """Base of every error that mpctl raises on purpose."""

    exit_code = 1


class InputError(MpctlError):
    """The specification, a flag or a file is bad; holds all issues at once."""

    exit_code = 2

    def __init__(self, issues: Iterable[Issue]) -> None:
        self.issues = tuple(issues)
        super().__init__("\n".join(str(issue) for issue in self.issues))

    @classmethod
    def of(cls, rule: str, where: str, message: str, hint: str = "") -> InputError:
        return cls([Issue(rule, where, message, hint)])


class RunFailed(MpctlError):
    """Work that had started did not finish."""
