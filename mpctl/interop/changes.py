"""What a launcher's flags or config say differently for another layout of the same job.

Both plans are written for the launcher, and read as keys with their words: what the user's own text
has besides, such as data and logs, is the same for both.

>>> [change.text for change in changed_keys({"--tp": ("8",), "--bf16": ()}, {"--tp": ("4",), "--zero": ("1",)})]
['--tp 8 -> 4', 'leave out --bf16', 'add --zero 1']
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mpctl.core.errors import InputError
from mpctl.core.units import seconds_text
from mpctl.interop.command_line import split_command
from mpctl.interop.config_text import Flags, flat_values, python_calls, read_yaml
from mpctl.interop.emitted import EmittedPlan, emit_plan
from mpctl.interop.shell import read_script
from mpctl.plan.planning.plan import make_plan
from mpctl.spec.job import JobSpec


class KeyChange(NamedTuple):
    """A key with its old and new words; None where it is not there."""

    key: str
    old: str | None
    new: str | None

    @property
    def text(self) -> str:
        """`--tensor-model-parallel-size 8 -> 4`, `add --bf16`, `leave out --bf16`."""
        if self.old is None:
            return f"add {self.key} {self.new}".rstrip()
        return f"leave out {self.key}" if self.new is None else f"{self.key} {self.old} -> {self.new}"


class LaunchChanges(NamedTuple):
    """What makes a launcher's job faster. seconds: of a step, before and after, None where the job as
    given has no time; does_not_fit: the job as given; changes; why_not: the launcher cannot say it."""

    launcher: str
    old_seconds: float | None
    new_seconds: float | None
    does_not_fit: bool
    changes: tuple[KeyChange, ...]
    why_not: str = ""

    def as_dict(self) -> dict[str, object]:
        """The values as JSON."""
        return {**self._asdict(), "changes": [change._asdict() for change in self.changes]}

    @property
    def headline(self) -> str:
        """The gain in words."""
        after = seconds_text(self.new_seconds) if self.new_seconds else "no time known"
        if self.does_not_fit:
            return f"your {self.launcher} job does not fit; the fastest that does takes {after} a step"
        if not self.old_seconds or not self.new_seconds:
            return f"the fastest layout takes {after} a step"
        saved = 1 - self.new_seconds / self.old_seconds
        before = seconds_text(self.old_seconds)
        return f"your {self.launcher} job takes {before} a step, the fastest {after}: {saved:.0%} less"


def launch_changes(launcher: str, old: JobSpec, new: JobSpec) -> LaunchChanges:
    """The changes between two complete jobs in the launcher's own keys."""
    plans = [make_plan(job) for job in (old, new)]
    times = [plan.estimate.step_seconds if plan.estimate else None for plan in plans]
    start = LaunchChanges(launcher, times[0], times[1], plans[0].fits is False, ())
    try:
        before, after = (_keys(emit_plan(plan, launcher)) for plan in plans)
    except InputError as error:
        return start._replace(why_not="; ".join(f"{issue.where}: {issue.message}" for issue in error.issues))
    changes = list(changed_keys(before, after))
    batch = KeyChange("micro batch, in the script", *(str(job.training.micro_batch_size) for job in (old, new)))
    if batch.old != batch.new and batch[1:] not in [change[1:] for change in changes]:
        changes.append(batch)
    return start._replace(changes=tuple(changes))


def changed_keys(old: Flags, new: Flags) -> Iterator[KeyChange]:
    """The keys that differ, in the order of the first, then of the second."""
    for key in dict.fromkeys((*old, *new)):
        words = [" ".join(flags[key]) if key in flags else None for flags in (old, new)]
        if words[0] != words[1]:
            yield KeyChange(key, *words)


def _keys(emitted: EmittedPlan) -> Flags:
    """The keys of an emitted text by its language."""
    if emitted.config and emitted.language == "shell":  # a script that writes its configs
        documents = read_script(emitted.body).documents.values()
        return {key: words for text in documents for key, words in read_yaml(text).items()}
    if emitted.language == "shell":
        line = split_command(emitted.body, {})
        return {**line.launcher, **line.flags}
    if emitted.language == "yaml":
        return read_yaml(emitted.body)
    calls, assigned = python_calls(emitted.body)
    made = {name.rpartition(".")[0] for name in calls}
    values = {key: value for key, value in assigned.items() if str(value).partition("(")[0] not in made}
    return flat_values({**values, **calls})
