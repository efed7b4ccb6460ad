"""The flags of a command line, or the values of a config file, while they are read into the
settings of a job, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import NamedTuple

from mpctl.core.errors import Issue
from mpctl.interop.command_line import Flags
from mpctl.interop.megatron_flags import MegatronFlag
from mpctl.plan.planning.plan import Overrides
from mpctl.plan.rules.check import Check

Settings = dict[str, object]


class ReadJob(NamedTuple):
    """A job that was read: its settings by full name, and warnings of flags that were ignored."""

    settings: Overrides
    warnings: tuple[Check, ...]


@dataclass
class FlagReader:
    """The flags that are being read, the settings found so far by full name, their issues, and
    warnings of flags planned as the nearest setting. software: whose flags they are, in the rules
    of issues and warnings (`megatron-flag`, `megatron-nearest`)."""

    flags: Flags
    settings: Settings = field(default_factory=dict)
    issues: list[Issue] = field(default_factory=list)
    warnings: list[Check] = field(default_factory=list)
    software: str = "megatron"

    def has(self, flag: str) -> bool:
        return flag in self.flags

    def value(self, flag: str, default: str = "") -> str:
        """The flag's first value, empty where it has none; the default where it is absent."""
        return next(iter(self.flags[flag]), "") if flag in self.flags else default

    def wrong(self, flag: str, message: str, hint: str = "") -> None:
        self.issues.append(Issue(f"{self.software}-flag", flag, message, hint))

    def nearest(self, flag: str, message: str, hint: str = "") -> None:
        """Warn that a flag is planned as the nearest setting of a job."""
        self.warnings.append(Check(f"{self.software}-nearest", "warning", flag, message, hint))

    def number(self, flag: str, kind: type[int] | type[float], default: int | float) -> int | float:
        """The flag's value as a number; the default where it is absent, or, with an issue, no
        number."""
        if flag not in self.flags:
            return default
        try:
            value = kind(self.value(flag))
        except ValueError:
            value = nan
        if isfinite(value):
            return value
        noun = "an integer" if kind is int else "a number"
        self.wrong(flag, f"{self.value(flag)!r} is not {noun}")
        return default

    def read_plain(self, flags: Iterable[MegatronFlag], *, defaults: bool = True) -> None:
        """Flags that are one setting each; where one is absent Megatron's default, if it has
        one."""
        for flag in flags:
            value: object = flag.default if defaults else None
            if self.has(flag.flag):
                value = self._plain_value(flag)
            elif isinstance(value, str) and flag.words:
                value = _word(flag, value)
            if value is not None:
                self.settings[flag.setting] = value

    def _plain_value(self, flag: MegatronFlag) -> object:
        text = self.value(flag.flag)
        if flag.kind is not str:
            return self.number(flag.flag, int if flag.kind is int else float, 1)
        if flag.words is None:
            return text
        value = _word(flag, text)
        if value is None:
            known = ", ".join(flag.words.values())
            self.wrong(flag.flag, f"{text!r} is none of those that a job can say", f"use {known}")
        return value


def says_ranks(setting: str) -> bool:
    """Whether a setting, by its full name, says how many ranks there are."""
    return setting.split(".")[0] == "cluster" or setting == "parallel.dp"


def _word(flag: MegatronFlag, theirs: str) -> str | None:
    """mpctl's word for Megatron's; `auto` and `fused` attention are flash."""
    words = {value: key for key, value in (flag.words or {}).items()}
    if flag.setting == "model.attention":
        words |= {"auto": "flash", "fused": "flash"}
    return words.get(theirs)
