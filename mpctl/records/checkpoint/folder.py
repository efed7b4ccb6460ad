"""RUN/checkpoints: which checkpoints there are, and the names that a save moves them through.

A checkpoint is a directory step-N (manifest.py has its files). It appears by renaming a complete
directory, `.step-N.partial`, so that step-N is never half written. A save that replaces a
checkpoint of the same step first renames the old one to `.step-N.replaced`; if it dies before the
second rename, the old one counts as the checkpoint. Other names are never read as checkpoints.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from mpctl.core.durable import remove, sync_folder, temporary_path
from mpctl.core.errors import InputError

DOCUMENTS = ("job.json", "plan.json")
"""Documents of a run that are copied into each of its checkpoints."""
STEP = re.compile(r"step-(\d+)")
DAMAGED = re.compile(r"damaged-step-\d+(-\d+)?")
PARTIAL, REPLACED, PRUNED = "partial", "replaced", "pruned"


class SaveTimes(TypedDict):
    """Time from the end of a step until its checkpoint was published, and the part of it that
    training waited: all of it if saving is not asynchronous."""

    step: int
    seconds: float
    stall_seconds: float


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint in RUN/checkpoints, oldest first."""
    replaced = {path.name: path for path in root.glob(f".step-*.{REPLACED}")}
    folders = {name[1 : -len(f".{REPLACED}")]: path for name, path in replaced.items()}
    folders |= {path.name: path for path in root.glob("step-*")}
    matches = [(STEP.fullmatch(name), path) for name, path in folders.items()]
    return sorted((int(match[1]), path) for match, path in matches if match)


def checkpoints_at(path: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the checkpoints at a path, oldest first: itself, or those of the run
    there."""
    if path.parent.name == "checkpoints":
        return [saved for saved in list_checkpoints(path.parent) if saved[1] == path]
    return list_checkpoints(path / "checkpoints")


def newest_checkpoint(run: Path) -> Path | None:
    """The checkpoint of the highest step in RUN/checkpoints; None without any."""
    saved = list_checkpoints(run / "checkpoints")
    return saved[-1][1] if saved else None


def partial_path(root: Path, step: int) -> Path:
    """The directory in which the checkpoint of `step` is assembled."""
    return hidden_sibling(root / f"step-{step}", PARTIAL)


def hidden_sibling(path: Path, state: str) -> Path:
    """`.step-N.STATE` for `step-N`: a name that is not listed as a checkpoint."""
    return path.with_name(f".{path.name}.{state}")


def publish(folder: Path, final: Path) -> None:
    """Rename a complete checkpoint to its final name; one of the same step is removed only after
    that."""
    replaced = hidden_sibling(final, REPLACED)
    if final.exists():
        remove(replaced)
        final.rename(replaced)
    folder.rename(final)
    sync_folder(final.parent)
    remove(replaced)


def recover(root: Path) -> None:
    """After a crash: restore the name of a checkpoint that was being replaced, and remove what was
    half written or half removed. No rank may be saving meanwhile."""
    for path in root.glob(f".step-*.{REPLACED}"):
        final = root / path.name[1 : -len(f".{REPLACED}")]
        if final.exists():
            remove(path)
        else:
            path.rename(final)
    for state in (PARTIAL, PRUNED):
        for path in root.glob(f".step-*.{state}"):
            remove(path)


def prunable(steps: Sequence[int], *, last: int, every: int) -> list[int]:
    """The steps whose checkpoints may be removed, of the saved steps in ascending order.

    last: how many of the newest to keep, 0 for all; every: keep multiples of it too, 0 for none.

    >>> prunable([10, 20, 30, 40, 50], last=2, every=20)
    [10, 30]
    """
    if last == 0:
        return []
    return [step for step in steps[:-last] if not (every and step % every == 0)]


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint to `damaged-step-N`, which is not listed; returns the path."""
    names = {path.name for path in folder.parent.iterdir()}
    base = f"damaged-{folder.name.strip('.')}"
    candidates = (base if n == 1 else f"{base}-{n}" for n in count(1))
    return folder.rename(folder.with_name(next(c for c in candidates if c not in names)))


def list_damaged(root: Path) -> list[Path]:
    """The damaged checkpoints that were set aside; the one that was renamed last is the last."""
    found = [path for path in root.glob("damaged-step-*") if DAMAGED.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.stat().st_ctime_ns)  # renaming sets ctime


def prune_damaged(root: Path, *, last: int) -> list[Path]:
    """Remove the damaged checkpoints that were set aside, except the one that was renamed last;
    returns them. last: the run's checkpoint.keep_last; 0, which keeps all, keeps these as well."""
    older = list_damaged(root)[:-1] if last else []
    for path in older:
        remove(path)
    return older


@contextmanager
def staged_folder(out: Path, mode: int = 0o777) -> Iterator[Path]:
    """A directory that is renamed to `out` at the end; InputError when `out` is occupied or cannot
    be written. mode: of the directory, less the umask."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise InputError.of(
            "out-occupied",
            str(out),
            "already holds something, nothing was written",
            "name a directory that is not there yet",
        )
    out = out.absolute()
    work = temporary_path(out)
    try:
        work.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir(mode)
        yield work
        work.rename(out)
    except OSError as error:
        why = f"cannot be written: {error.strerror or error}"
        hint = "name a directory that can be written"
        raise InputError.of("out-unusable", str(out), why, hint) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
