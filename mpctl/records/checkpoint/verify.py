"""Whether the bytes of checkpoints are those that were written, read without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from mpctl.core.errors import InputError, Issue
from mpctl.records.checkpoint.manifest import OnBytes, ShardFile, read_manifest, read_shard_record

HASHED_AT_ONCE = 4  # files; a disk reads faster than one thread hashes
SHOWN_ISSUES = 20

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) of a task that takes long."""


def ignore_progress(stage: str, done: int, total: int) -> None:
    """A Progress that shows nothing."""


def counted(stage: str, total: int, on_progress: Progress) -> OnBytes:
    """An `on_bytes` that reports (stage, bytes done, bytes in all); several threads may call it."""
    done, lock = 0, Lock()

    def on_bytes(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            on_progress(stage, min(done, total), total)

    return on_bytes


def checkpoint_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("shard-*.safetensors"))


def find_damage(folder: Path, *, hashed: bool = True, on_bytes: OnBytes | None = None) -> list[Issue]:
    """Find damage in a checkpoint's files: at most about SHOWN_ISSUES issues; empty if undamaged.

    hashed: also compare the sha256 of all files, about a second a GB; else only sizes.
    """
    try:
        manifest = read_manifest(folder)
    except InputError as error:
        return list(error.issues)

    def check(shard: ShardFile) -> Sequence[Issue]:
        try:
            read_shard_record(folder, shard, hashed=hashed, on_bytes=on_bytes)
        except InputError as error:
            return error.issues
        return ()

    issues: list[Issue] = []
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        for first in range(0, len(manifest.shards), SHOWN_ISSUES):
            for found in pool.map(check, manifest.shards[first : first + SHOWN_ISSUES]):
                issues += found
            if len(issues) >= SHOWN_ISSUES:
                break
    return issues


def newest_undamaged(
    saved: Sequence[tuple[int, Path]], *, hashed: bool = True, on_bytes: OnBytes | None = None
) -> tuple[tuple[int, Path] | None, list[tuple[Path, list[Issue]]]]:
    """The newest undamaged checkpoint as (step, folder), or None, and the damaged ones that are
    newer, each with its issues. saved: (step, folder) of the checkpoints, oldest first."""
    damaged: list[tuple[Path, list[Issue]]] = []
    for step, folder in reversed(saved):
        issues = find_damage(folder, hashed=hashed, on_bytes=on_bytes)
        if not issues:
            return (step, folder), damaged
        damaged.append((folder, issues))
    return None, damaged
