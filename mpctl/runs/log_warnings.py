"""Warnings in the logs of the ranks of a run that is going on, each of them once.

A thousand ranks print the same warning. Entries that look like a warning are reported when they
first appear, with the ranks that printed them by then; those that are alike (rundir/log_entries.py)
never again in the same launch.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from mpctl.rundir.log_entries import Template
from mpctl.rundir.merged_logs import MergedEntry
from mpctl.runs.follow_logs import MergedFollower
from mpctl.units import ranks_text

WARNING = re.compile(r"\w*Warning: |\bWARN(?:ING)?\b|\[W\d{4} |^W\d{4} ")
LOOK_SECONDS, MOST_WARNINGS = 2.0, 20


class WarningWatch:
    """Reports warnings of ranks from a thread while its block runs. on_warning: called with a line
    for each; never from two threads at once."""

    def __init__(self, run: Path, on_warning: Callable[[str], None]) -> None:
        self.on_warning = on_warning
        self.follower = MergedFollower(run, ())
        self.shown: set[tuple[str, ...]] = set()
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="warnings", daemon=True)

    def __enter__(self) -> WarningWatch:
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.is_over.set()
        self.thread.join()

    def look(self, is_last: bool = False) -> None:
        """Report what has been printed since the last call."""
        for entry in self.follower.poll(is_last):
            if WARNING.search(entry.lines[0]):
                self._report(entry)

    def _report(self, entry: MergedEntry) -> None:
        parts = Template.of(entry.text).parts
        if parts in self.shown or len(self.shown) > MOST_WARNINGS:
            return
        self.shown.add(parts)
        if len(self.shown) > MOST_WARNINGS:
            self.on_warning("ranks print more warnings: mpctl logs shows them")
        else:
            self.on_warning(f"{ranks_text(entry.ranks, most=3)}: {entry.lines[0]}")

    def _watch(self) -> None:
        while not self.is_over.wait(LOOK_SECONDS):
            self.look()
        self.look(is_last=True)
