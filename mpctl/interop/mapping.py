"""The rows of a launcher: each of its keys with the setting of a job that it says.

The writer asks `written` for the keys of a job, the reader `KeyReader.read` for the settings of
flags or of a config file; both take the same rows. A key that combines several settings has a
function in its row for writing, and is read by the launcher's own module.

By hand, a row of Megatron-LM: training.weight_decay 0.1 is `--weight-decay 0.1`, and without the
flag Megatron takes 0.01.

>>> row = ForeignKey("--lr-decay-style", "training.lr_schedule", str, "linear", {"wsd": "WSD", "linear": "linear"})
>>> reader = KeyReader({"--lr-decay-style": ("WSD",)}, "megatron")
>>> reader.read([row])
>>> reader.settings
{'training.lr_schedule': 'wsd'}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite, nan
from types import MappingProxyType
from typing import Any, NamedTuple

from mpctl.core.errors import InputError, Issue
from mpctl.interop.config_text import Flags, Value, is_true, word
from mpctl.plan.planning.plan import Overrides
from mpctl.plan.rules.check import Check
from mpctl.spec.job import JobSpec

NO_SETTINGS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A key of a launcher, a flag or a dotted name, and the setting that it says.

    setting: `table.key` of a job; empty where the key alone says none. default: the launcher's, in
    its own words; None where there is none, or where it depends on others. words: the setting's
    values in the launcher's words; also: other words of the launcher, and the setting's value. value:
    what is written, where that is not the setting: a constant, or a function of the job, which
    answers None to leave the key out.
    """

    key: str
    setting: str = ""
    kind: type[int] | type[float] | type[str] | type[bool] = str
    default: int | float | str | bool | None = None
    words: Mapping[Any, Value] | None = None
    also: Mapping[str, str] = field(default_factory=lambda: NO_SETTINGS)
    value: Callable[[JobSpec], Any] | Value = None

    def of(self, job: JobSpec) -> Value:
        """The key's value for a job; None where it is left out."""
        if self.value is not None and not callable(self.value):
            return self.value
        if callable(self.value):
            own: Any = self.value(job)
        else:
            own = job
            for name in self.setting.split("."):  # None where a table is absent, as training.adapter
                own = getattr(own, name, None)
        found: Value = own if self.words is None or own is None else self.words[own]
        return found

    def setting_of(self, theirs: str) -> Any:
        """The setting's value for a word of the launcher; None for a word that no job can say."""
        words = {word(value): key for key, value in (self.words or {}).items()} | dict(self.also)
        return words.get(theirs)


def written(job: JobSpec, rows: Iterable[ForeignKey]) -> Iterator[tuple[str, Value]]:
    """The keys of a job with their values in the launcher's words; None is left out."""
    for row in rows:
        if (value := row.of(job)) is not None:
            yield row.key, value


Settings = dict[str, object]
SHOWN = 24
"""Keys that one warning lists."""


class ReadJob(NamedTuple):
    """A job that was read: its settings by full name, and warnings of keys that were ignored."""

    settings: Overrides
    warnings: tuple[Check, ...]


@dataclass
class KeyReader:
    """Flags, or the values of a config file, while they are read into the settings of a job.

    software: the launcher, for the rules of issues and warnings (`megatron-flag`,
    `megatron-nearest`). settings: those found so far, by full name; issues; warnings of keys that
    are planned as the nearest setting.
    """

    flags: Flags
    software: str
    settings: Settings = field(default_factory=dict)
    issues: list[Issue] = field(default_factory=list)
    warnings: list[Check] = field(default_factory=list)

    def has(self, key: str) -> bool:
        return key in self.flags

    def value(self, key: str, default: str = "") -> str:
        """The key's first value, empty where it has none; the default where it is absent."""
        return next(iter(self.flags[key]), "") if key in self.flags else default

    def is_on(self, key: str, default: bool = False) -> bool:
        """Whether the key says yes; the default where it is absent."""
        return is_true(self.value(key)) if key in self.flags else default

    def wrong(self, key: str, message: str, hint: str = "") -> None:
        self.issues.append(Issue(f"{self.software}-flag", key, message, hint))

    def nearest(self, key: str, message: str, hint: str = "") -> None:
        """Warn that a key is planned as the nearest setting of a job."""
        self.warn("nearest", key, message, hint)

    def warn(self, rule: str, key: str, message: str, hint: str = "") -> None:
        named = message if key in message else f"{key}: {message}"
        self.warnings.append(Check(f"{self.software}-{rule}", "warning", key, named, hint))

    def number(self, key: str, kind: type[int] | type[float], default: int | float) -> int | float:
        """The key's value as a number; the default where it is absent, or, with an issue, no
        number."""
        if key not in self.flags:
            return default
        try:
            value = kind(self.value(key))
        except ValueError:
            value = nan
        if isfinite(value):
            return value
        noun = "an integer" if kind is int else "a number"
        self.wrong(key, f"{self.value(key)!r} is not {noun}")
        return default

    def read(self, rows: Iterable[ForeignKey], *, defaults: bool = True) -> None:
        """Set the setting of each row; where its key is absent, to the launcher's default if it has
        one."""
        for row in rows:
            if not row.setting:
                continue
            value: object = row.default if defaults else None
            if self.has(row.key):
                value = self._value_of(row)
            elif value is not None and row.words:
                value = row.setting_of(word(value))
            if value is not None:
                self.settings[row.setting] = value

    def _value_of(self, row: ForeignKey) -> object:
        text = self.value(row.key)
        if row.kind in (int, float):
            return self.number(row.key, int if row.kind is int else float, 1)
        if row.kind is bool:
            return row.setting_of(word(is_true(text))) if row.words else is_true(text)
        if row.words is None:
            return text
        value = row.setting_of(text)
        if value is None:
            known = ", ".join(word(value) for value in row.words.values() if value is not None)
            self.wrong(row.key, f"{text!r} is none of those that a job can say", f"use {known}")
        return value

    def job(self, runtime: str, unread: Iterable[str] = ()) -> ReadJob:
        """The job that was read, under a runtime. unread: keys with their values that may change
        the plan, for one warning. Raises InputError with all issues."""
        if self.issues:
            raise InputError(self.issues)
        rest = [text[:80] for text in unread]
        changes: tuple[Check, ...] = ()
        if rest:
            more = f" and {len(rest) - SHOWN} more" if len(rest) > SHOWN else ""
            message = f"{', '.join(rest[:SHOWN])}{more}: not read, and may change the layout, its memory or speed"
            changes = (Check(f"{self.software}-changes", "warning", "--from", message),)
        return ReadJob({**self.settings, "training.runtime": runtime}, (*changes, *self.warnings))


def says_ranks(setting: str) -> bool:
    """Whether a setting, by its full name, says how many ranks there are."""
    return setting.split(".")[0] == "cluster" or setting == "parallel.dp"
