"""Whether a directory is a run, and of which user: what may be resumed, replaced and obeyed.

RUN/.mpctl-run marks a directory that a launch wrote, so that `--overwrite` and `--resume` never
take one that holds something else. A launch writes the marker before any other file and removes it
after all others. A job.json and a plan.json prove nothing: `mpctl plan --json` writes a plan, and
people keep jobs next to it. Runs older than the marker are recognised by the log of their first
torchrun; for a resumption, which removes nothing, also by their checkpoints.

A run directory holds what a launch runs (programs that job.json names) and what a stop cancels (the
job in launcher.json). One that somebody else has written is therefore refused, as git refuses a
repository of another user. Accepted are directories of this user and of root, and below sudo those
of the user who called it. A launch also refuses what group or others can write, as ssh does: a job
can be changed in place. What nobody else can reach, such as all of a directory of mode 0700, may
have any mode.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import stat
from collections.abc import Iterable
from pathlib import Path
from shlex import quote

from mpctl import __version__
from mpctl.core.errors import InputError
from mpctl.records.checkpoint.folder import list_checkpoints

MARKER = ".mpctl-run"
SCHEMA = "mpctl.run-dir/1"
COMMAND = "\n$ "
"""The beginning of the section of each torchrun in logs/torchrun.log; its command line follows."""
WORKER = "-m mpctl.train.runtime.worker "
LOG_BYTES = 65536
OPTION = "--allow-other-owner"
DOCUMENTS = (".", "job.json", "launcher.json", "nodes")
"""The files of a run directory that are obeyed; a launch also takes its job from a checkpoint."""


def write_marker(folder: Path) -> None:
    """Mark a directory as a run's. Raises OSError when it cannot be written."""
    document = {"schema": SCHEMA, "version": __version__}
    (folder / MARKER).write_text(json.dumps(document) + "\n", "utf-8")


def is_launched(folder: Path) -> bool:
    """Whether a launch wrote this directory, so that its files may be removed."""
    return _schema(folder / MARKER) == SCHEMA or _has_log(folder)


def is_resumable(folder: Path) -> bool:
    """Whether a run can be continued here: the directory was written by a launch, or has a plan, a
    job and a checkpoint."""
    if is_launched(folder):
        return True
    is_planned = _schema(folder / "plan.json").startswith("mpctl.plan/")
    is_job = (folder / "job.json").is_file()
    return is_planned and is_job and bool(list_checkpoints(folder / "checkpoints"))


def _has_log(folder: Path) -> bool:
    """Whether logs/torchrun.log begins with the command line of a launch."""
    try:
        with (folder / "logs" / "torchrun.log").open("rb") as log:
            begin = log.read(LOG_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return False
    return begin.startswith(COMMAND) and WORKER in begin.removeprefix(COMMAND).partition("\n")[0]


def _schema(path: Path) -> str:
    """The value of `schema` in a JSON document; empty when there is none."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""
    return str(document.get("schema", "")) if isinstance(document, dict) else ""


def require_own(run: Path) -> None:
    """Raises InputError when a run directory, or a file in it that is obeyed, belongs to another
    user. One that does not exist belongs to nobody."""
    _require_owners(run / name for name in DOCUMENTS)


def require_own_job(run: Path) -> None:
    """The same for all from which a launch takes its job, and when group or others can write any of
    it. Raises InputError."""
    checkpoints = [folder for _, folder in list_checkpoints(run / "checkpoints")]
    copies = [path for folder in checkpoints for path in (folder, folder / "job.json")]
    below = [run / "checkpoints", *copies]
    _require_owners([*(run / name for name in DOCUMENTS), *below])
    for path in (*(run / name for name in DOCUMENTS[1:]), *below):
        _require_closed(run, path)
    _require_closed(run, run)


def _require_owners(paths: Iterable[Path]) -> None:
    user, caller = os.geteuid(), os.environ.get("SUDO_UID", "")
    below_sudo = {int(caller)} if user == 0 and caller.isdecimal() else set()
    for path in paths:
        try:
            owner = path.stat().st_uid
        except OSError:
            continue
        if owner not in {user, 0, *below_sudo}:
            message = f"{path} belongs to {_name(owner)}, and you are {_name(user)}"
            hint = f"read its job.json and launcher.json, and add {OPTION} if you trust them"
            raise InputError.of("run-dir-owner", "--run-dir", message, hint)


REACH = ((stat.S_IWGRP, stat.S_IXGRP), (stat.S_IWOTH, stat.S_IXOTH))
"""For group and others: the bit to write a file and the bit to pass a folder."""


def _require_closed(run: Path, path: Path) -> None:
    """Raises InputError when group or others can write a file or folder of a run directory, and
    pass all folders above it there. What a link leads to may be reached on another way."""
    folders = [run, *reversed([p for p in path.parents if run in p.parents])]
    try:
        status = path.stat()
        passed = [folder.stat().st_mode for folder in folders if folder != path]
    except OSError:
        return
    if any(place.is_symlink() for place in (path, *folders[1:])):
        passed = []
    for may_write, may_pass in REACH:
        needed = may_write | (may_pass if stat.S_ISDIR(status.st_mode) else 0)
        if status.st_mode & needed == needed and all(mode & may_pass for mode in passed):
            who = "everybody" if may_write == stat.S_IWOTH else f"group {_group(status.st_gid)}"
            message = f"{path} can be written by {who} (mode {stat.S_IMODE(status.st_mode):04o})"
            hint = f"read its job.json, then chmod -R go-w {quote(str(run))}, or add {OPTION}"
            raise InputError.of("run-dir-shared", "--run-dir", message, hint)


def _group(group: int) -> str:
    """A group's name, and the number where it has none here."""
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return str(group)


def _name(user: int) -> str:
    """A user's name, and the number where it has none here."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
