"""The command lines of other launchers that a job can be read from, by the launcher's name."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

from mpctl.errors import InputError
from mpctl.interop.from_megatron import ReadJob, read_megatron
from mpctl.rules.check import Check, listed

READERS = {"megatron": read_megatron}
EXAMPLE = 'such as "--num-layers 24 ...", or @FILE for a file of them'


def read_flags(launcher: str, text: str, typed: Collection[str] = ()) -> ReadJob:
    """The job that a launcher's command line is.

    text: the flags or the whole command; `@FILE` is a file that holds it, `-` is stdin. typed: the
    settings that mpctl's own command line gives beside it. Raises InputError for another launcher,
    for a file that cannot be read, and for flags that are wrong or leave the vocabulary open.
    """
    if launcher not in READERS:
        message = f"{launcher!r} is no launcher whose flags are read"
        raise InputError.of("from-launcher", "--from", message, f"use {listed([*READERS])}")
    content = _content(text)
    if not content.strip():
        hint = f"give the flags as one text, {EXAMPLE}"
        raise InputError.of("bad-syntax", "--from", "there are no flags to read", hint)
    read = READERS[launcher](content)
    known = {*read.settings, *typed}
    if "model.layers" in read.settings and not known & {"model", "model.vocab"}:
        message = "is not there, and no tokenizer is asked for the vocabulary"
        raise InputError.of("megatron-flag", "--vocab-size", message,
                            "add it, or --set model.vocab=N")  # fmt: skip
    if any(name.split(".")[0] == "cluster" or name == "parallel.dp" for name in known):
        return read
    message = "neither the flags nor the command line say how many ranks there are: dp 1 is planned"
    hint = "add --nodes and --gpus-per-node, or --cluster"
    return read._replace(
        warnings=(*read.warnings, Check("from-world", "warning", "--from", message, hint))
    )


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
    _check_has_flags(text)
    return text


def _check_has_flags(text: str) -> None:
    """Raises InputError for a typed text without any flag, such as a file's name without its @."""
    if not text.strip() or any(word.startswith("--") for word in text.split()):
        return
    if len(text) < 256 and Path(text).is_file():
        message = f"{text!r} is a file, and flags are wanted"
        raise InputError.of("bad-syntax", "--from", message, f"write @{text} for the flags in it")
    message = f"{text[:80]!r} has no flag"
    raise InputError.of("bad-syntax", "--from", message, f"give the flags as one text, {EXAMPLE}")
