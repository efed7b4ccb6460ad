"""Options that write files: stdout is for the result of a command, so `-` is refused for all of them. The folder
of a page or table is looked for before the work whose result it would hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path

from mpctl.core.errors import InputError

PAGES = ("--html", "--csv")
WRITTEN = ("--html", "--csv", "--svg", "--trace", "--out", "--save")


def require_files(arguments: Sequence[str]) -> None:
    """Raises InputError where an option that writes a file is given `-`, which would be a file of that name,
    or a page or table has no folder."""
    own = list(takewhile(lambda word: word != "--", arguments))
    given = [f"{option}={value}" for option, value in pairwise(own)]
    for option in WRITTEN:
        if f"{option}=-" in (*given, *own):
            message = "- is no file: stdout has the result of the command"
            raise InputError.of("usage", option, message, "name a file or folder")
    for word in (*given, *own):
        option, is_given, path = word.partition("=")
        if option in PAGES and is_given and not Path(path).parent.is_dir():
            hint = "name a file in a folder that exists"
            raise InputError.of("unwritable", option, f"{path}: there is no folder {Path(path).parent}", hint)
