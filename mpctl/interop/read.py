"""The command lines of other launchers that a job can be read from, by the launcher's name."""

from __future__ import annotations

import sys
from pathlib import Path

from mpctl.errors import InputError
from mpctl.interop.from_megatron import ReadJob, read_megatron
from mpctl.rules.check import listed

READERS = {"megatron": read_megatron}


def read_flags(launcher: str, text: str) -> ReadJob:
    """The job that a launcher's command line is.

    text: the flags or the whole command; `@FILE` is a file that holds it, `-` is stdin. Raises
    InputError for another launcher, for a file that cannot be read, and for flags that are wrong.
    """
    if launcher not in READERS:
        message = f"{launcher!r} is no launcher whose flags are read"
        raise InputError.of("from-launcher", "--from", message, f"use {listed([*READERS])}")
    return READERS[launcher](_content(text))


def _content(text: str) -> str:
    try:
        if text == "-":
            return sys.stdin.read()
        if text.startswith("@"):
            return Path(text[1:]).read_text("utf-8")
    except OSError as error:
        raise InputError.of("no-such-file", text[1:], error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise InputError.of("bad-syntax", text, str(error)) from None
    return text
