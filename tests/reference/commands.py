"""Every command with its arguments and options, as the command line itself knows them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from mpctl.cli.app import app
from mpctl.cli.options import FLAGS
from tests.reference.types import number_text, type_text

SHARED = {flag.option.split("/")[0] for flag in FLAGS} | {"--set", "--fetch"}
COMMON = {"--help", "--install-completion", "--show-completion"}
HEAD = "| option | value | default | meaning |\n|---|---|---|---|"


def commands(command: Any = None, path: tuple[str, ...] = ("mpctl",)) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by what is typed for it."""
    command = command or typer.main.get_command(app)
    if not hasattr(command, "list_commands"):
        yield " ".join(path), command
        return
    for name in command.list_commands(None):
        yield from commands(command.get_command(None, name), (*path, name))


def commands_text() -> str:
    return "\n\n".join(_command_text(typed, command) for typed, command in commands())


def shared_options_text() -> str:
    """The options that name settings of a job, which several commands take."""
    rows = [f"| `{flag.option.replace('/', '`, `')}` | `{flag.setting}` |" for flag in FLAGS]
    return "| option | setting |\n|---|---|\n" + "\n".join(rows)


def _command_text(typed: str, command: Any) -> str:
    takes_job = any(p.name == "job" for p in command.params)
    shared = COMMON | SHARED if takes_job else COMMON
    own = [p for p in command.params if not shared & set(p.opts)]
    arguments = [_argument_name(p) for p in own if p.param_type_name == "argument"]
    title = " ".join([typed, *arguments])
    parts = [f"### {title}", _prose(command.help or "")]
    if takes_job:
        parts.append("Takes the options of a job.")
    rows = [_row(p) for p in own]
    return "\n\n".join([*parts, *([HEAD + "\n" + "\n".join(rows)] if rows else [])])


def _argument_name(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required or name.startswith("[") else f"[{name}]"


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name, value = _prose(_argument_name(parameter)), ""
    else:
        name = "`, `".join([*parameter.opts, *parameter.secondary_opts])
        value = "" if parameter.is_flag else _value(parameter)
    meaning = _prose(parameter.help or "")
    return f"| `{name}` | {value} | {_default(parameter)} | {meaning} |".replace("  ", " ")


def _value(parameter: Any) -> str:
    kind = type_text(parameter.type_descriptor.annotation)
    if parameter.metavar:
        kind = f"`{parameter.metavar}`"
    least, most = parameter.min, parameter.max
    if least is not None:
        end = "or more" if most is None else f"to {number_text(most)}"
        kind += f", {number_text(least)} {end}"
    return kind + (", repeatable" if parameter.multiple else "")


def _default(parameter: Any) -> str:
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if parameter.required:
        return "required"
    if parameter.default in (None, False) or parameter.show_default is False:
        return ""
    return f"`{parameter.default}`"


def _prose(text: str) -> str:
    """Help as one line of a table; a bar would end its cell."""
    return " ".join(inspect.cleandoc(text).split()).replace("|", "\\|")
