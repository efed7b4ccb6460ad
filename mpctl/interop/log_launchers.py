"""The logs of all launchers: whose line a line is, and what a dump of settings says as a job.

By hand, a line with `elapsed time per iteration (` may be a step of Megatron-LM, and one with
` arguments --` begins the dump of its settings.

>>> [*LOGS]
['megatron', 'torchtitan', 'deepspeed', 'trainer', 'nanotron']
"""

from __future__ import annotations

import re
from math import prod

from mpctl.interop.emitted import get_launcher
from mpctl.interop.log_formats import LauncherLog, PrintedConfig
from mpctl.interop.mapping import ReadJob
from mpctl.interop.registry import TARGETS

EMITTED = {log.name: target for target in TARGETS if (log := get_launcher(target).log)}
"""The launcher of `--emit` by the name of its log."""
LOGS = {name: log for name, target in EMITTED.items() if (log := get_launcher(target).log)}
STEP_LINES = [(log.name, number, line) for log in LOGS.values() for number, line in enumerate(log.lines)]
_HEADS = {head: log.name for log in LOGS.values() for head in log.heads}
_HEAD = re.compile("|".join(map(re.escape, _HEADS)))
_VOCAB = re.compile(r"padded vocab \(size: (\d{1,9})\)")


def looked_for() -> list[str]:
    """`'elapsed time per iteration' (Megatron-LM)`, for each kind of line."""
    return [f"{line.mark.strip(' :=(')!r} ({LOGS[name].software}{line.version})" for name, _, line in STEP_LINES]


def is_beside(one: str, other: str) -> bool:
    """Whether a run prints lines or settings of both launchers."""
    return one == other or other in LOGS[one].beside or one in LOGS[other].beside


def head_of(text: str) -> str:
    """The head of a dump of settings that begins in this line; empty where none does."""
    found = _HEAD.search(text)
    return found[0] if found and "end of arguments" not in text else ""


class DumpReader:
    """Reads the dumps of settings in the lines of a log, one after the other."""

    def __init__(self) -> None:
        self._open: LauncherLog | None = None
        self._state: list[str] = []

    def read(self, text: str, config: PrintedConfig, head: str) -> None:
        """Add what a line says to the settings. head: its `head_of`."""
        if head:
            self._open, self._state = LOGS[_HEADS[head]], []
            config.begin(self._open.name)
        if self._open is None or self._open.read is None:
            if "padded vocab" in text and (found := _VOCAB.search(text)):
                config.add("vocab_size", found[1])
        elif not self._open.read(text, head, self._state, config):
            self._open = None


def ranks_of(config: PrintedConfig) -> int | None:
    """The ranks that printed settings say, or whose product they are."""
    names = LOGS[config.kind].ranks if config.kind else ()
    sizes = [config.values[name] for name in names if name in config.values]
    if not sizes or not all(size.isdecimal() and len(size) < 9 for size in sizes):
        return None
    return prod(map(int, sizes)) or None


def read_printed(config: PrintedConfig) -> ReadJob | None:
    """The job that printed settings are; None where there are none that are enough. Raises
    InputError as `--from` does, for settings that no job says."""
    job = LOGS[config.kind].job if config.kind else None
    return job(config.values) if job is not None else None
