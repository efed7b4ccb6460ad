"""Every command with its arguments and options, as the command line itself knows them."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import typer

from mpctl.cli.app import app
from mpctl.cli.options import FLAGS
from tests.reference.types import number_text, type_text

SHARED = {flag.option.split("/")[0] for flag in FLAGS} | {"--set", "--fetch"}
COMMON = {"--help", "--install-completion", "--show-completion"}
OFTEN = 2  # an option that reads the same in as many commands is described once
OF_A_JOB = ("--lora", "--qlora", "--gpus", "--from")
GROUPS = {
    "of a bench": ("--device", "--out", "--overwrite", "--quick", "--budget"),
    "of hosts": ("--hostfile", "--include", "--exclude"),
}
"""Shared options that go together, under one name."""
PAGES = {
    "mpctl why": "why.md",
    "mpctl runs": "runs.md#list-and-show",
    "mpctl status": "runs.md#watch",
    "mpctl logs": "runs.md#logs",
    "mpctl stop": "runs.md#stop",
    "mpctl bench tensor-modes": "tensor-modes.md",
    "mpctl bench": "bench.md",
    "mpctl tune": "tune.md",
    "mpctl calibrate": "other-launchers.md#own-runs-in-logs-of-other-launchers",
    "mpctl doctor": "doctor.md",
    "mpctl sample": "sampling.md#write-text",
    "mpctl eval": "sampling.md#evaluate",
    "mpctl mcp": "programs.md#coding-agents",
}
"""The pages on commands, by how these begin: the reference has what a command does and its exit codes."""
EXIT_CODES = re.compile(r"(?:The exit code|Exit codes?)\b[^.]*\.")


def commands(command: Any = None, path: tuple[str, ...] = ("mpctl",)) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by what is typed for it."""
    command = command or typer.main.get_command(app)
    if not hasattr(command, "list_commands"):
        yield " ".join(path), command
        return
    for name in command.list_commands(None):
        yield from commands(command.get_command(None, name), (*path, name))


def commands_text() -> str:
    """The options that many commands share, then a section for each command."""
    own = {typed: _own(command) for typed, command in commands()}
    count = Counter((_name(p), _row(p)) for parameters in own.values() for p in parameters)
    most = {name: row for (name, row), times in reversed(count.most_common()) if times >= OFTEN}
    shared = {*most.values()}
    groups = "; ".join(f"{name} are {_listed(options)}" for name, options in GROUPS.items())
    parts = ["### Shared options", "\n".join(row for _, row in count if row in shared), f"Options {groups}."]
    parts += [_command_text(typed, command, own[typed], shared) for typed, command in commands()]
    return "\n\n".join(parts)


def flags_text() -> str:
    """The options that set a job's settings, by name: the settings say what they mean."""
    return ", ".join(f"`{flag.option}`" for flag in FLAGS)


def _own(command: Any) -> list[Any]:
    """The parameters of a command other than help and, if it takes a job, the job's options."""
    hidden = COMMON | SHARED if _takes_job(command) else COMMON
    return [p for p in command.params if not hidden & set(p.opts) and not getattr(p, "hidden", False)]


def _takes_job(command: Any) -> bool:
    return any(p.name == "job" for p in command.params)


def _command_text(typed: str, command: Any, own: list[Any], shared: set[str]) -> str:
    arguments = [_argument_name(p) for p in own if p.param_type_name == "argument"]
    names = [_name(p) for p in own if p.param_type_name == "option" and _row(p) in shared]
    groups = [name for name, options in GROUPS.items() if {*options} <= {*names}]
    grouped = {*OF_A_JOB} if _takes_job(command) else set()
    grouped |= {option for name in groups for option in GROUPS[name]}
    also = [_listed(name for name in names if name not in grouped)] if {*names} - grouped else []
    also += [f"options {name}" for name in groups]
    if _takes_job(command):
        lacks = [option for option in OF_A_JOB if option not in names]
        also.append("options of a job" + (f" (but {_listed(lacks)})" if lacks else ""))
    parts = [f"### {' '.join([typed, *arguments])}", _help_text(typed, command)]
    parts += ["\n".join(rows)] if (rows := [row for row in map(_row, own) if row not in shared]) else []
    return "\n\n".join([*parts, *([f"Also: {', '.join(also)}."] if also else [])])


def _help_text(typed: str, command: Any) -> str:
    """A command's help without its examples, and without what its page says."""
    lines = inspect.cleandoc(command.help or "").splitlines()
    first, _, rest = "\n".join(line for line in lines if not line.lstrip("\b ").startswith("mpctl ")).partition("\n\n")
    page = next((page for name, page in PAGES.items() if typed.startswith(name)), None)
    told = [*EXIT_CODES.findall(_prose(rest)), f"More: [{page.partition('#')[0]}]({page})."] if page else [rest]
    return _prose(" ".join([first, *told]))


def _name(parameter: Any) -> str:
    return str(parameter.opts[-1] if parameter.param_type_name == "option" else _argument_name(parameter))


def _listed(options: Iterable[str]) -> str:
    return ", ".join(f"`{option}`" for option in options)


def _argument_name(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required or name.startswith("[") else f"[{name}]"


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        names, value = [_prose(_argument_name(parameter))], ""
    else:
        names = [*parameter.opts, *parameter.secondary_opts]
        value = "" if parameter.is_flag else _value(parameter)
    facts = "; ".join(filter(None, [value, _default(parameter)]))
    help_text = _prose(parameter.help or "").replace("; repeatable", "")  # the brackets say so
    return f"- `{'`, `'.join(names)}`{f' ({facts})' if facts else ''}: {help_text}"


def _value(parameter: Any) -> str:
    kind = type_text(parameter.type_descriptor.annotation)
    if kind == "string":
        kind = ""
    if parameter.metavar:
        kind = f"`{parameter.metavar}`"
    least, most = parameter.min, parameter.max
    if least is not None:
        end = "or more" if most is None else f"to {number_text(most)}"
        kind = f"{'' if kind == 'integer' else f'{kind}, '}{number_text(least)} {end}"
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
    """Help as one line."""
    return " ".join(inspect.cleandoc(text).split())
