"""The setting launch.slurm.extra: options of sbatch, checked and quoted for a script.

sbatch reads a `#SBATCH` line as a shell would: words in quotes are one, `#` begins a comment. It
accepts the beginning of a long option for the option itself, `--part` for `--partition`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpctl.errors import Issue

CONTROL = re.compile(r"[\x00-\x1f\x7f]")
LONG = re.compile(r"(--[A-Za-z][A-Za-z0-9-]*)(?:(=| +)(.*))?")
SHORT = re.compile(r"(-[A-Za-z])( *)(.*)")
WHERE = "launch.slurm.extra"
SET_BY = {
    "cluster.nodes": ("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node"),
    "launch.threads_per_rank": ("--cpus-per-task", "-c"),
    "launch.slurm.partition": ("--partition", "-p"),
    "launch.slurm.account": ("--account", "-A"),
    "launch.slurm.time": ("--time", "-t"),
    "launch.slurm.qos": ("--qos", "-q"),
    "launch.slurm.constraint": ("--constraint", "-C"),
    "launch.slurm.requeue": ("--requeue", "--no-requeue"),
    "launch.slurm.signal_seconds": ("--signal",),
    "name": ("--job-name", "-J"),
    "--run-dir": ("--output", "-o", "--error", "-e", "--open-mode", "--chdir", "-D"),
}
"""Options that follow from another setting, by that setting."""
SETTING_OF = {option: setting for setting, options in SET_BY.items() for option in options}
UNFIT = ("--wrap", "--array", "-a", "--parsable", "--test-only", "--wait", "-W", "--export")
"""Options that make another kind of job, or change what sbatch prints."""


class ExtraOption(NamedTuple):
    """An option of sbatch. separator: what stands before the value, `=`, a space or nothing; value:
    empty for an option without one."""

    name: str
    separator: str
    value: str

    @property
    def text(self) -> str:
        """The option as it stands in a script, its value quoted."""
        value = shlex.quote(self.value) if self.value else ""
        return f"{self.name}{self.separator}{value}"


def read_option(text: str) -> ExtraOption | None:
    """`--mail-type=END`, `-w n1`, `-wn1` or `--exclusive`; None for text that is no option or has
    a line break."""
    match = LONG.fullmatch(text) or SHORT.fullmatch(text)
    if match is None or CONTROL.search(text):
        return None
    name, separator, value = (part or "" for part in match.groups())
    return ExtraOption(name, separator[:1], value)


def read_options(texts: Sequence[str]) -> list[ExtraOption]:
    """The options in launch.slurm.extra that can be read."""
    return [option for text in texts if (option := read_option(text)) is not None]


def extra_issues(texts: Sequence[str]) -> Iterator[Issue]:
    """What is wrong with launch.slurm.extra: text that is no option, options that follow from
    another setting, options that make another kind of job."""
    for text in texts:
        option = read_option(text)
        if option is None:
            hint = "write each as on sbatch's command line, in one line: --mail-type=END"
            yield Issue("slurm-extra", WHERE, f"{text!r} is not an option of sbatch", hint)
        elif setting := _setting_of(option.name):
            hint = f"use {setting}" if setting.startswith("--") else f"use --set {setting}=..."
            yield Issue("slurm-extra", WHERE, f"{text!r} follows from {setting}", hint)
        elif option.name in UNFIT:
            message = f"{text!r} does not fit a job of mpctl"
            yield Issue("slurm-extra", WHERE, message, "leave it out")


def _setting_of(name: str) -> str | None:
    """The setting that an option, or an option that begins so, follows from."""
    if not name.startswith("--"):
        return SETTING_OF.get(name)
    return next((s for option, s in SETTING_OF.items() if option.startswith(name)), None)
