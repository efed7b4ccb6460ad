"""RUN/nodes/status.json: what the launcher knows of all hosts and ranks, for `mpctl status`.

Processes and breadcrumbs of ranks are seen by their own host alone. The launcher knows all of it
from the node agents and writes it here every STATUS_SECONDS, and once more when the attempt is
over. The file is replaced as a whole, and not synchronised: after a crash of the host it means
nothing.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from mpctl.durable import temporary_beside
from mpctl.launch.attempt import AttemptState
from mpctl.launch.cluster import Attempt

STATUS_SECONDS = 2.0
STATUS_BYTES = 1 << 28


@checked(frozen=True)
class AttemptReport:
    """The content of status.json. time: when it was written, in seconds since 1970."""

    time: float
    state: AttemptState
    schema: Literal["mpctl.attempt/1"] = "mpctl.attempt/1"


REPORT: TypeAdapter[AttemptReport] = TypeAdapter(AttemptReport)


@dataclass
class StatusFile:
    """Writes the state of one attempt while it runs."""

    path: Path
    next_write: float = float("-inf")

    def update(self, attempt: Attempt) -> None:
        """Write the state when STATUS_SECONDS have passed."""
        if time.monotonic() >= self.next_write:
            self.next_write = time.monotonic() + STATUS_SECONDS
            self.write(attempt.look())

    def write(self, state: AttemptState) -> None:
        """Write this state; a file that cannot be written is left as it is."""
        content = REPORT.dump_json(AttemptReport(time.time(), state))
        temporary = temporary_beside(self.path)
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content)
            temporary.replace(self.path)


def read_status(path: Path) -> AttemptReport | None:
    """The report in a file; None when there is none, or the file holds something else."""
    try:
        if not path.is_file() or path.stat().st_size > STATUS_BYTES:
            return None
        return REPORT.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
