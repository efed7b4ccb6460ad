"""RUN/logs/launcher.log: what the launcher told people while a run went on, a line each with its
time, so that `mpctl logs RUN --launcher` tells it to whoever was not there."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True)
class EventLog:
    """Appends messages to a file and passes them on to `then`; a message that cannot be written (a
    full disk) is passed on all the same."""

    path: Path
    then: Callable[[str], None]
    clock: Callable[[], float] = time.time

    def write(self, message: str) -> None:
        """Append a message, `2026-11-22T03:40:12Z SIGTERM: finishing this step and saving`."""
        moment = datetime.fromtimestamp(self.clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8", errors="replace") as stream:
                stream.write(f"{moment} {' '.join(message.splitlines())}\n")

    def event(self, message: str) -> None:
        """Append a message and pass it on."""
        self.write(message)
        self.then(message)
