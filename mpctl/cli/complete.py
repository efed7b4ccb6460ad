"""Shell completion for `mpctl`: presets, names and values of settings, run directories.

Typer completes commands, options and the words of an option; this file adds what only mpctl knows.
Completion runs while somebody types, so names of presets are read from folders without importing
the job's models, and any failure completes nothing. Where nothing is completed the shell completes
files: `mpctl plan jobs/a<TAB>`. By hand: `--set recompute=s<TAB>` -> `selective`.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mpctl.core.errors import MpctlError

if TYPE_CHECKING:
    from mpctl.spec.presets import Kind

Completer = Callable[[str], list[str]]
PLAIN = re.compile(r"[\w.+@%:/=,-]+")
MARKS = (".mpctl-run", "job.json")  # of a run directory


def _quiet(find: Callable[[str], Iterable[str]]) -> Completer:
    """A completer that returns nothing where `find` fails, such as in an unreadable folder, and no
    word with characters that a shell treats specially, since files may have any name."""

    def completer(incomplete: str) -> list[str]:
        try:
            words = (word for word in find(incomplete) if word.startswith(incomplete))
            return sorted(word for word in words if PLAIN.fullmatch(word))
        except (MpctlError, OSError):
            return []

    completer.__doc__ = find.__doc__
    return completer


def preset_of(kind: Kind) -> Completer:
    """Completes the name of a preset of one kind, a model's id, or a TOML file of this folder."""

    def names(incomplete: str) -> Iterable[str]:
        from mpctl.spec.presets import hub_ids, preset_names

        if kind == "models" and "/" in incomplete:
            return hub_ids()
        return [*preset_names(kind), *_files(incomplete)]

    return _quiet(names)


def _files(incomplete: str) -> list[str]:
    """The TOML files of this folder; other paths are left to the shell."""
    return [] if "/" in incomplete else [path.name for path in Path().glob("*.toml")]


def value_of(setting: str) -> Completer:
    """Completes the value of a setting by its full name."""

    def values(_: str) -> Iterable[str]:
        from mpctl.spec.schema import choices_of

        return choices_of(setting)

    return _quiet(values)


@_quiet
def setting(incomplete: str) -> Iterable[str]:
    """Completes KEY=VALUE: names of settings, then their legal values."""
    from mpctl.spec.names import full_name
    from mpctl.spec.schema import choices_of, settings

    key, equals, _ = incomplete.partition("=")
    if not equals:
        names = settings(short="." not in key) + ([] if "." in key else settings())
        names = [name for name in names if name.startswith(key)]
        if len(names) != 1 or not (words := choices_of(full_name(names[0]))):
            return [f"{name}=" for name in names]
        return [f"{names[0]}={word}" for word in words]
    return [f"{key}={word}" for word in choices_of(full_name(key))]


@_quiet
def groups(incomplete: str) -> Iterable[str]:
    """Completes a list of axes, `tp,dp`, or all or none."""
    from mpctl.core.axes import AXIS_NAMES

    before, comma, _ = incomplete.rpartition(",")
    given = before.split(",")
    words = [f"{before}{comma}{axis}" for axis in AXIS_NAMES if axis not in given]
    return words if comma else [*words, "all", "none"]


@_quiet
def gpus(incomplete: str) -> Iterable[str]:
    """Completes GPUs by count and device, `4xa100-80gb`, or any."""
    from mpctl.spec.gpus import CLUSTERS

    count, _, _ = incomplete.partition("x")
    return [f"{count}x{device}" for device in CLUSTERS] if count.isdecimal() else ["any"]


@_quiet
def runtimes(incomplete: str) -> Iterable[str]:
    """Completes a list of runtimes, `megatron-core,torchtitan`, or all."""
    from mpctl.spec.presets import preset_names

    before, comma, _ = incomplete.rpartition(",")
    words = [f"{before}{comma}{name}" for name in preset_names("runtimes")]
    return words if comma else [*words, "all"]


@_quiet
def run(incomplete: str) -> Iterable[str]:
    """Completes a run: its name in runs/, or its directory."""
    folder = Path(incomplete[: incomplete.rfind("/") + 1] or ".")
    found = [str(path) for path in _runs_in(folder)]
    return found if "/" in incomplete else [*found, *(path.name for path in _runs_in(Path("runs")))]


def _runs_in(folder: Path) -> list[Path]:
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in paths if any((path / mark).is_file() for mark in MARKS)]


def kind_or_preset(incomplete: str) -> list[str]:
    """Completes the first word after `mpctl presets`: a kind, or the name of any preset."""
    from mpctl.spec.presets import KINDS

    names = {name for kind in KINDS for name in preset_of(kind)(incomplete)}
    return [*_quiet(lambda _: KINDS)(incomplete), *sorted(names - {*_files(incomplete)})]


def preset_of_kind(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes the name after `mpctl presets KIND`."""
    from mpctl.spec.presets import KINDS

    kind = next((known for known in KINDS if known == ctx.params.get("kind")), None)
    return preset_of(kind)(incomplete) if kind else []


def complete_for_bash(run_command: Callable[[], object]) -> None:
    """Answer bash, which treats `=` as a separate word and replaces only what follows it.

    `mpctl plan --set recompute=s` comes as the words --set, recompute, = and s; typer is asked for
    `recompute=s` and its answers are printed without `recompute=`.
    """
    words, current = _joined(os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"]))
    os.environ |= {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(current)}
    typed = words[current] if current < len(words) else ""
    before = typed[: typed.rfind("=") + 1] if not typed.startswith("-") else ""
    answer = io.StringIO()
    try:
        with redirect_stdout(answer):
            run_command()
    finally:
        for line in answer.getvalue().splitlines():
            print(line.removeprefix(before))


def _joined(words: list[str], current: int) -> tuple[list[str], int]:
    """`["a", "=", "b"]` -> `["a=b"]`, and the new position of word number `current`."""
    joined: list[str] = []
    at = current
    for number, word in enumerate(words):
        if joined and number > 1 and (word == "=" or joined[-1].endswith("=")):
            joined[-1] += word
        else:
            joined.append(word)
        if number == current:
            at = len(joined) - 1
    return joined, at
