"""Options that write files: stdout is for the result of a command, so `-` is refused for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile

from mpctl.core.errors import InputError

WRITTEN = ("--html", "--csv", "--svg", "--trace", "--out", "--save")


def require_files(arguments: Sequence[str]) -> None:
    """Raises InputError where an option that writes a file is given `-`, which would be a file of that name."""
    own = list(takewhile(lambda word: word != "--", arguments))
    given = [f"{option}={value}" for option, value in pairwise(own)]
    for option in WRITTEN:
        if f"{option}=-" in (*given, *own):
            message = "- is no file: stdout has the result of the command"
            raise InputError.of("usage", option, message, "name a file or folder")
