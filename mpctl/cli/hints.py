"""Hints for commands and options that do not exist: what may have been meant."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NoReturn

from typer.core import TyperGroup

from mpctl.core.errors import InputError, Issue

# What people type, in other software too, and the command that does it.
COMMANDS = {
    "init": ("new", "create", "setup", "quickstart", "wizard"),
    "launch": ("train", "run", "start", "pretrain", "finetune", "torchrun", "worker"),
    "launch --resume --run-dir RUN": ("resume", "continue"),
    "launch --rehearse": ("rehearse", "simulate", "dry-run"),
    "plan": ("estimate", "layout", "check", "validate", "memory", "groups"),
    "fit MODEL": ("fits", "lora", "qlora", "peft", "vram"),
    "compare": ("diff", "versus"),
    "emit": ("export", "translate"),
    "status": ("ps", "watch", "squeue", "top", "describe"),
    "logs": ("log", "tail"),
    "stop": ("cancel", "scancel", "kill", "abort", "delete"),
    "search": ("optimize", "find", "best"),
    "tune": ("autotune", "autotuning"),
    "bench scaling": ("benchmark", "scaling"),
    "bench trace RUN": ("profile", "trace", "timeline"),
    "calibrate": ("calibration",),
    "doctor": ("diagnose", "env", "collect-env", "ds-report", "health", "info", "test"),
    "data prepare": ("prepare", "tokenize", "preprocess", "dataset"),
    "checkpoint import": ("import", "convert", "import-weights"),
    "checkpoint export": ("export", "export-weights"),
    "checkpoint list RUN": ("checkpoints", "ckpt"),
    "checkpoint verify RUN": ("verify", "fsck"),
    "checkpoint reshard": ("reshard",),
    "presets": ("preset", "list", "ls", "models", "clusters", "devices", "jobs"),
    "schema": ("json-schema",),
    "--version": ("version",),
}


class HintingGroup(TyperGroup):
    """A group of commands that suggests one when the command typed does not exist."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command at the start of `args`. Raises InputError when there is no such command."""
        if not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            raise_unknown(args[0], ctx.command_path, self.list_commands(ctx))
        return super().resolve_command(ctx, args)


def raise_unknown(name: str, group: str, commands: Iterable[str]) -> NoReturn:
    """Raise InputError for a command that `group` does not have, with the nearest names."""
    from difflib import get_close_matches  # only where something is wrong

    known = list(commands)
    meant = [ours for ours, theirs in COMMANDS.items() if name.lower() in theirs]
    near = [f"mpctl {ours}" for ours in meant]
    near = near or [f"{group} {command}" for command in get_close_matches(name, known, n=2)]
    hint = f"use {' or '.join(near)}" if near else f"commands: {', '.join(known)}"
    raise InputError.of("unknown-command", group, f"there is no command {name!r}", hint)


def usage_issue(error: Any, words: str) -> Issue:
    """The issue for a usage error of the command line parser, whose message is `words`."""
    option = getattr(error, "option_name", None)
    if option is None or not hasattr(error, "possibilities"):
        return Issue("usage", option or "command line", words.replace("Value error, ", ""))
    command = error.ctx.command_path if error.ctx else "mpctl"
    parameters = error.ctx.command.params if error.ctx else []
    known = {name for parameter in parameters for name in parameter.opts}
    hint = _setting_hint(option, known) if "--set" in known else ""
    if not hint and error.possibilities:
        hint = f"did you mean {' or '.join(sorted(error.possibilities))}?"
    of_job = " and `mpctl help job`" if "--set" in known else ""
    hint = hint or f"see `{command} --help`{of_job}"
    return Issue("usage", option, f"{command} has no such option", hint)


def _setting_hint(option: str, known: Collection[str]) -> str:
    """A hint at the flag or setting that this option probably means, here or in other software;
    empty if there is none. known: the command's options."""
    from mpctl.cli.options import FLAGS
    from mpctl.spec.names import full_name
    from mpctl.spec.synonyms import MEANT, NOT_OFFERED

    name = option.lstrip("-").replace("-", "_").lower()
    if name in NOT_OFFERED:
        return NOT_OFFERED[name]
    setting = MEANT.get(name, full_name(name))
    if setting == name:
        return ""
    flags = (flag.option.split("/")[0] for flag in FLAGS if flag.setting == setting)
    flag = next((flag for flag in flags if flag in known), f"--set {setting}=VALUE")
    return f"use {flag}"
