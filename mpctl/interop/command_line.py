"""A command line of another launcher, as the user gives it: its text, its job, and its flags, from a
shell script; torchrun's flags separately.

>>> line = split_command("X=1 torchrun --nnodes 2 train.py --tp-size=4 --bf16", {"--bf16": 0})
>>> line.flags, line.launcher
({'--tp-size': ('4',), '--bf16': ()}, {'--nnodes': ('2',)})
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpctl.core.errors import InputError
from mpctl.interop.config_text import Flags, unreadable
from mpctl.interop.emitted import get_launcher
from mpctl.interop.mapping import NO_SETTINGS, ReadJob, says_ranks
from mpctl.interop.registry import SOURCES
from mpctl.plan.planning.plan import Overrides
from mpctl.plan.rules.check import Check, listed

EXPAND = "in a copy of the script write echo before torchrun, run it with bash, and give what it prints"
"""The way out where a command line contains variables and arrays of a shell."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The flags of a program, and those of the launcher before it, each with its values. A repeated
    flag has its last values, as in argparse."""

    flags: Flags
    launcher: Flags


def split_command(text: str, counts: Mapping[str, int]) -> CommandLine:
    """The words of a command line as a shell reads them, comments and broken lines included.

    counts: how many values a known flag takes, -1 for any number; an unknown flag takes all words
    up to the next flag. Words before the one that ends in `.py` are the launcher's. Raises
    InputError for a quote that is not closed, a word that belongs to no flag, a flag without its
    values, and a variable or an array of a shell that may contain flags.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise unreadable(f"the flags end early: {error}", "") from None
    program = next((n for n, word in enumerate(words) if word.endswith(".py")), None)
    if program is None:
        return CommandLine(_flags(words, counts), {})
    return CommandLine(_flags(words[program + 1 :], counts), _launcher(words[:program]))


def is_unexpanded(word: str) -> bool:
    """Whether a shell would expand the word."""
    return "$" in word or "`" in word


def _launcher(words: Sequence[str]) -> Flags:
    """The flags before the program; assignments, names of programs and words that a shell would
    expand are skipped, as options can state the ranks."""
    starts = [n for n, word in enumerate(words) if word.startswith("--")]
    rest = words[starts[0] :] if starts else []
    return _flags([word for word in rest if not is_unexpanded(word)], {})


def _flags(words: Sequence[str], counts: Mapping[str, int]) -> Flags:
    flags: Flags = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise _stray(word, words)
        name, equals, value = word.partition("=")
        values = [value] if equals else []
        count = counts.get(name, -1)
        while rest and not rest[0].startswith("--") and (count < 0 or len(values) < count):
            if _is_array(rest[0]) or (count < 0 and values and is_unexpanded(rest[0])):
                raise _stray(rest[0], words)  # it may hold flags
            values.append(rest.pop(0))
        if count >= 0 and len(values) != count:
            message = f"takes {count or 'no'} value{'s' * (count != 1)}, and has {len(values)}"
            raise InputError.of("megatron-flag", name, message)
        flags[name] = tuple(values)
    return flags


def _is_array(word: str) -> bool:
    """Whether the word expands to an array of a shell: `${ARGS[@]}`, `$@`."""
    return "[@]" in word or "[*]" in word or word in ("$@", "$*")


def _stray(word: str, words: Sequence[str]) -> InputError:
    """words: all words; if a shell would expand any, they come from a script."""
    message = f"{word!r} belongs to no flag"
    if is_unexpanded(word):
        message = f"{word!r} is for a shell to expand, and none runs here"
    hint = "give the flags of the training program alone, or its whole command line"
    is_script = any(map(is_unexpanded, words))
    return unreadable(message, EXPAND if is_script else hint)


EXAMPLE = 'such as "--num-layers 24 ...", or @FILE for a file of them'


def read_flags(launcher: str, text: str, typed: Overrides = NO_SETTINGS) -> ReadJob:
    """The job that a launcher's command line is.

    text: the flags or the full command; `@FILE` is a file that contains it, `-` is stdin. typed:
    the settings on mpctl's command line, which override it. Raises InputError for another launcher,
    for a file that cannot be read, and for flags that are wrong.
    """
    if launcher not in SOURCES:
        message = f"{launcher!r} is no launcher whose flags are read"
        raise InputError.of("from-launcher", "--from", message, f"use {listed(SOURCES)}")
    content = _content(text)
    if not content.strip():
        raise unreadable("there are no flags to read", f"give the flags as one text, {EXAMPLE}")
    reader = get_launcher(launcher).read
    assert reader is not None
    read = reader(content, typed)
    known = {*read.settings, *typed}
    if any(map(says_ranks, known)):
        return read
    message = "neither the flags nor the command line say how many ranks there are: dp 1 is planned"
    hint = "add --nodes and --gpus-per-node, or --cluster"
    return read._replace(warnings=(*read.warnings, Check("from-world", "warning", "--from", message, hint)))


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
        raise unreadable(message, f"write @{text} for the flags in it")
    raise unreadable(f"{text[:80]!r} has no flag", f"give the flags as one text, {EXAMPLE}")
