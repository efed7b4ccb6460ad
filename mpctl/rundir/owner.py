"""Whether a run directory may be acted on: it has to belong to who acts.

A run directory holds what a launch runs (programs that job.json names) and what a stop cancels (the
job in launcher.json). One that somebody else has written is therefore refused, as git refuses a
repository of another user. Accepted are directories of this user and of root, and below sudo those
of the user who called it.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from mpctl.errors import InputError

OPTION = "--allow-other-owner"
DOCUMENTS = (".", "job.json", "launcher.json", "nodes")
"""What in a run directory is obeyed."""


def require_own(run: Path) -> None:
    """Raises InputError when a run directory, or a file in it that is obeyed, belongs to another
    user. One that does not exist belongs to nobody."""
    for name in DOCUMENTS:
        path = run / name
        owner = _owner(path)
        if owner is not None and owner not in _accepted():
            message = f"{path} belongs to {_name(owner)}, and you are {_name(os.geteuid())}"
            hint = f"read its job.json and launcher.json, and add {OPTION} if you trust them"
            raise InputError.of("run-dir-owner", "--run-dir", message, hint)


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except OSError:
        return None


def _accepted() -> set[int]:
    """The users whose run directories are obeyed."""
    user, caller = os.geteuid(), os.environ.get("SUDO_UID", "")
    below_sudo = {int(caller)} if user == 0 and caller.isdecimal() else set()
    return {user, 0, *below_sudo}


def _name(user: int) -> str:
    """A user's name, and the number where it has none here."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
