"""A command line of another launcher as flags, from a shell script; torchrun's flags separately.

>>> line = split_command("X=1 torchrun --nnodes 2 train.py --tp-size=4 --bf16", {"--bf16": 0})
>>> line.flags, line.launcher
({'--tp-size': ('4',), '--bf16': ()}, {'--nnodes': ('2',)})
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpctl.core.errors import InputError

Flags = dict[str, tuple[str, ...]]
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
        raise InputError.of("bad-syntax", "--from", f"the flags end early: {error}") from None
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
    return InputError.of("bad-syntax", "--from", message, EXPAND if is_script else hint)
