"""The newest checkpoint whose bytes are those that were written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from mpctl.errors import Issue
from mpctl.rundir.shards import checkpoint_bytes, newest_undamaged

Progress = Callable[[str, int, int], None]


def unseen(stage: str, done: int, total: int) -> None:
    """No progress is shown."""


def newest_verified(
    saved: Sequence[tuple[int, Path]], on_progress: Progress
) -> tuple[tuple[int, Path] | None, list[tuple[Path, list[Issue]]]]:
    """newest_whole with the sha256 of all files, about a second a GB; on_progress is told of the
    stage `verify` in bytes. saved: (step, folder), oldest first."""
    done, lock = 0, Lock()
    total = sum(checkpoint_bytes(folder) for _, folder in saved[-1:])

    def on_bytes(count: int) -> None:
        nonlocal done
        with lock:  # several files are hashed at once
            done += count
            on_progress("verify", min(done, total), total)

    return newest_undamaged(saved, on_bytes=on_bytes)
