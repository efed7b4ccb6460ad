"""Finding the newest checkpoint whose bytes are those that were written, with its progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from mpctl.errors import Issue
from mpctl.rundir.shards import checkpoint_bytes, newest_undamaged

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) of a task that takes long."""


def ignore_progress(stage: str, done: int, total: int) -> None:
    """A Progress that shows nothing."""


def newest_verified(
    saved: Sequence[tuple[int, Path]], on_progress: Progress
) -> tuple[tuple[int, Path] | None, list[tuple[Path, list[Issue]]]]:
    """`newest_undamaged` with the sha256 of all files, about a second a GB.

    saved: (step, folder) of the checkpoints, oldest first; on_progress: called with ("verify",
    bytes done, bytes in all).
    """
    done, lock = 0, Lock()
    total = sum(checkpoint_bytes(folder) for _, folder in saved[-1:])

    def on_bytes(count: int) -> None:
        nonlocal done
        with lock:  # several files are hashed at once
            done += count
            on_progress("verify", min(done, total), total)

    return newest_undamaged(saved, on_bytes=on_bytes)
