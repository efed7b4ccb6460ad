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
from mpctl.interop.config_text import Flags, read_yaml, unreadable
from mpctl.interop.emitted import get_launcher
from mpctl.interop.mapping import NO_SETTINGS, ReadJob, says_ranks
from mpctl.interop.registry import SOURCES
from mpctl.interop.shell import ScriptLaunch, is_script, program_of, read_script
from mpctl.interop.shell_words import is_unexpanded
from mpctl.plan.planning.plan import Overrides
from mpctl.plan.rules.check import Check, listed

EXPAND = "write its value there, in a copy of the script"
"""The way out where a value is a shell's variable that nothing sets."""


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
    program = program_of(words)
    if program is None:
        return CommandLine(_flags(words, counts), {})
    return CommandLine(_flags(words[program + 1 :], counts), _launcher(words[:program]))


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
            raise _stray(word, words, next(reversed(flags), ""))
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


def _stray(word: str, words: Sequence[str], before: str = "") -> InputError:
    """The error of a word that belongs to no flag. before: the flag that has its values already."""
    if is_unexpanded(word):
        return unreadable(f"{word!r} is for a shell to expand, and none runs here", EXPAND)
    follows = f": {before} has its values before it" if before else ""
    hint = "give the flags of the training program alone, or its whole command line"
    return unreadable(f"{word!r} belongs to no flag{follows}", hint)


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
    launch = read_script(content) if is_script(content) else None
    if launch is None:
        read = reader(content, typed)
    else:
        try:
            read = reader(_config_of(launch, launcher), {**launch.cluster, **typed})
        except InputError as error:
            raise launch.with_lines(error) from None
        warnings = [w for w in launch.warnings if w.rule != "script-ranks" or not any(map(says_ranks, typed))]
        read = ReadJob({**launch.cluster, **read.settings}, (*warnings, *read.warnings))
    known = {*read.settings, *typed}
    if any(map(says_ranks, known)):
        return read
    message = "neither the flags nor the command line say how many ranks there are: dp 1 is planned"
    hint = "add --nodes and --gpus-per-node, or --cluster"
    return read._replace(warnings=(*read.warnings, Check("from-world", "warning", "--from", message, hint)))


CONFIG_FLAGS = {
    "deepspeed": ("--deepspeed_config", "--deepspeed", "--ds_config"),
    "nanotron": ("--config-file",),
    "accelerate": ("--config_file", "--config-file"),
    "trl": ("--config", "--config_file", "--accelerate_config"),
}
"""Flags of a launch line that name a launcher's config file."""


def _config_of(launch: ScriptLaunch, launcher: str) -> str:
    """The text that a launcher's reader takes: the launch line, or the config that the script itself
    writes. Raises InputError with the line to type where the config is another file."""
    if launcher == "trl":
        return _with_configs(launch)
    file = launch.flag(*CONFIG_FLAGS.get(launcher, ()))
    if not file or (launcher == "deepspeed" and file.startswith("-")):
        return launch.text
    if file in launch.documents:
        return launch.documents[file]
    ranks = "".join(f" --{name.split('.')[1].replace('_', '-')} {n}" for name, n in launch.cluster.items())
    message = f"line {launch.line} names its config, {file}, and a script's other files are not read"
    raise unreadable(message, f"give it: --from {launcher} @{file}{ranks}")


def _with_configs(launch: ScriptLaunch) -> str:
    """TRL's launch line, whose two configs, its own and accelerate's, are flags on it where the script
    writes them, and stay named where it does not."""
    words = list(launch.words)
    for names in (CONFIG_FLAGS["trl"][:1], CONFIG_FLAGS["trl"][1:]):
        if (file := launch.flag(*names)) not in launch.documents:
            continue
        at = next(n for n, word in enumerate(words) if word.partition("=")[0] in names)
        given = {word.partition("=")[0] for word in words}
        flags = [(f"--{name.rsplit('.', 1)[-1]}", values) for name, values in read_yaml(launch.documents[file]).items()]
        words[at : at + (1 if "=" in words[at] else 2)] = [
            word for flag, values in flags if flag not in given for word in (flag, *values)
        ]
    return shlex.join(words)


def _content(text: str) -> str:
    try:
        if text == "-":
            return _decoded("stdin", sys.stdin.buffer.read(LARGEST + 1))
        if text.startswith("@"):
            return _file_text(Path(text[1:]))
    except OSError as error:
        raise InputError.of("no-such-file", text[1:], error.strerror or str(error)) from None
    _check_has_flags(text)
    return text


LARGEST = 2**20
"""Bytes of a script or a config."""


def _file_text(path: Path) -> str:
    """The text of a file. Raises InputError for one that is too large, or no text."""
    with path.open("rb") as file:
        return _decoded(str(path), file.read(LARGEST + 1))


def _decoded(name: str, content: bytes) -> str:
    message = ""
    if len(content) > LARGEST:
        message = f"more than {LARGEST:,} bytes, which no script or config has"
    elif b"\0" in content:
        message = "no text: it has null bytes"
    else:
        try:
            return content.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            message = f"no text: byte {error.start} is not UTF-8"
    raise InputError.of("bad-syntax", name, message, "name the launch script or the config file")


def _check_has_flags(text: str) -> None:
    """Raises InputError for a typed text without any flag, such as a file's name without its @."""
    if not text.strip() or is_script(text) or any(word.startswith("--") for word in text.split()):
        return
    if len(text) < 256 and Path(text).is_file():
        message = f"{text!r} is a file, and flags are wanted"
        raise unreadable(message, f"write @{text} for the flags in it")
    raise unreadable(f"{text[:80]!r} has no flag", f"give the flags as one text, {EXAMPLE}")
