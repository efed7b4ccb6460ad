"""A job file for people to edit: TOML whose comments explain each line.

A comment is the key's description in docs/reference.md, or a reason in this job, such as where a
number comes from. The setting `parallel.tp` of 8 becomes in its table

    tp = 8  # tensor-parallel size
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any

from mpctl.render.console import say
from mpctl.render.parts import Facts
from mpctl.render.terminal import print_parts
from mpctl.spec.schema import description_of

WIDTH = 100


@dataclass(frozen=True)
class JobFile:
    """Content of a job file. about: lines of the comment at the top; settings: by full name, in the
    order in which they are written; reasons: comments in place of the descriptions, of settings and of
    tables, by name; commands: the next commands, each with its effect; not_launched: why `mpctl launch`
    is not among them; examples: settings that are written as comments."""

    about: Sequence[str]
    settings: Mapping[str, Any]
    reasons: Mapping[str, str]
    commands: Sequence[tuple[str, str]] = ()
    not_launched: Sequence[str] = ()
    examples: Mapping[str, Any] = field(default_factory=dict)


def job_text(file: JobFile) -> str:
    """The TOML text; `tomllib` reads the settings back."""
    width = max((len(command) for command, _ in file.commands), default=0)
    commands = [f"  {command:{width}}  {does}" for command, does in file.commands]
    lines = [f"# {line}".rstrip() for line in [*file.about, *([""] if commands else []), *commands]]
    tables: dict[str, list[str]] = {"": []}
    for name, value in [*file.settings.items(), *file.examples.items()]:
        table, _, key = name.rpartition(".")
        comment = file.reasons.get(name) or description_of(name).partition(";")[0]
        rows = tables.setdefault(table, [])
        rows += _line(f"# {key}" if name in file.examples else key, value, comment)
    for table, rows in tables.items():
        title = [f"[{table}]"] if table else []
        reason = [f"# {line}" for line in wrap(file.reasons.get(table, ""), WIDTH - 2)]
        lines += ["", *reason, *title, *rows] if rows else []
    return "\n".join(lines) + "\n"


def _line(key: str, value: Any, comment: str) -> list[str]:
    """`tp = 8  # tensor-parallel size`; a comment that is too long goes above."""
    written = f"{key} = {_toml(value)}"
    if not comment or len(written) + len(comment) + 4 <= WIDTH:
        return [f"{written}  # {comment}" if comment else written]
    return [*(f"# {line}" for line in wrap(comment, WIDTH - 2)), written]


def _toml(value: Any) -> str:
    """A value as TOML writes it: text, numbers, booleans and lists of them as JSON does, but for
    DEL, which JSON leaves as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def print_written(path: Path, rows: Sequence[tuple[str, str]], file: JobFile) -> None:
    """Say what was written, with which choices, and the commands that come next."""
    say(f"wrote {path}")
    print_parts([Facts(rows)])
    say("next")
    for command, _ in file.commands:
        say(f"  {command}")
    for reason in file.not_launched:
        say(f"! {reason}")
