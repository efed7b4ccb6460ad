"""The `mpctl` command: finds the subcommand, runs it, turns errors into messages and exit codes.

A subcommand's module is imported only when it is used, so that `mpctl plan` never pays for
`mpctl launch`. Exit codes: 0 done; 1 the run failed; 2 bad input; 3 legal, but it does
not fit the devices' memory (`plan`, `emit`, `search`, `launch --rehearse`); 4 a gate failed
(`compare --fail-if`); 128 + n on signal n.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from importlib import import_module
from typing import Any

import typer

from mpctl import __version__
from mpctl.cli.files import require_files
from mpctl.cli.hints import HintingGroup, usage_issue
from mpctl.cli.own_help import OwnHelp
from mpctl.core.errors import InputError, Issue, MpctlError

PANELS = {
    "Plan": {
        "fit": "fit:fit",
        "init": "init:init",
        "plan": "plan:plan",
        "search": "search:search",
        "report": "report:report",
        "compare": "compare:compare",
        "explain": "explain:explain",
        "emit": "emit:emit",
        "batch": "batch:batch",
        "ui": "ui:ui",
        "why": "why:why",
    },
    "Run": {
        "launch": "launch:launch",
        "runs": "runs:runs",
        "status": "runs:status",
        "logs": "runs:logs",
        "show": "runs:show",
        "stop": "runs:stop",
        "checkpoint": "checkpoint:app",
        "data": "data:app",
    },
    "Measure": {
        "bench": "bench:app",
        "tune": "tune:tune",
        "calibrate": "calibrate:calibrate",
        "score": "score:score",
        "doctor": "doctor:doctor",
    },
    "More": {
        "presets": "presets:presets",
        "schema": "presets:schema",
        "sample": "trained:sample",
        "eval": "trained:eval_",
        "tensor-modes": "compare:tensor_modes",
        "mcp": "mcp:mcp",
        "help": "help:help_",
    },
}
"""The commands by panel of `mpctl --help`: each one's module in mpctl.cli, and its function there, or the app
of a group."""
COMMANDS = {name: where for panel in PANELS.values() for name, where in panel.items()}
FORMER = {"weights": "checkpoint"}
"""Former names of commands."""
FORMER_MODES = {
    "--batch": "batch",
    "--compare": "compare",
    "--explain": "explain",
    "--compare-tensor-modes": "tensor-modes",
}
"""Commands that were options of `plan`: `plan demo --explain time` is `explain demo time`."""

UNUSABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
"""Errors of the operating system about a path that cannot be used."""


class LazyGroup(HintingGroup):
    """The commands, each imported only when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands in the order in which --help lists them."""
        return list(COMMANDS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command at the start of `args`, possibly under a former name."""
        return super().resolve_command(ctx, _renamed(args))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return a command; None when there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        found = getattr(import_module(f"mpctl.cli.{module}"), name)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
            alone.command(cls=OwnHelp)(found)
            found = alone
        command: Any = typer.main.get_command(found)
        command.name = cmd_name
        command.rich_help_panel = next(panel for panel, own in PANELS.items() if cmd_name in own)
        return command


def _renamed(args: list[str]) -> list[str]:
    """The words of today for a command under a former name."""
    name, *words = args
    for at, word in enumerate(words if name == "plan" else ()):
        option, _, value = word.partition("=")
        if option in FORMER_MODES:
            return [FORMER_MODES[option], *words[:at], *filter(None, [value]), *words[at + 1 :]]
    return [FORMER.get(name, name), *words]


app = typer.Typer(
    cls=LazyGroup,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # of all commands
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"mpctl {__version__}")
        raise typer.Exit


@app.callback()
def mpctl(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Plan a parallel layout of transformer training, launch it, compare the plan with the run."""


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; bad input never ends in a traceback."""
    wants_json, stdout = "--json" in arguments, _stdout_status()
    try:
        require_files(arguments)
        return app(args=arguments, standalone_mode=False, prog_name="mpctl") or 0
    except MpctlError as error:
        issues = error.issues if isinstance(error, InputError) else ()
        return _report(issues or [Issue("run-failed", "mpctl", str(error))], wants_json, error)
    except KeyboardInterrupt:
        return 130
    except SystemExit as exit_:
        if _has_lost_reader(exit_, stdout):  # `mpctl plan --json | head -1`
            return 0
        raise
    except OSError as error:
        if error.errno not in UNUSABLE or error.filename is None:
            raise
        hint = "name a path that exists and that this user may read or write"
        issue = Issue("path-unusable", str(error.filename), str(error.strerror), hint)
        return _report([issue], wants_json, InputError([issue]))
    except Exception as error:
        if not hasattr(error, "format_message"):  # not a usage error of the command line
            from mpctl.run.launch.environment import hidden_modules

            if hidden := list(hidden_modules()):
                return _report(hidden, False, InputError(hidden))
            raise
        message = error.format_message()
        if not message:  # a group without a command has shown its help instead
            return 2
        return _report([usage_issue(error, message)], wants_json, None)


def _stdout_status() -> os.stat_result | None:
    """The `fstat` of stdout; None where it has no file descriptor."""
    try:
        return os.fstat(sys.stdout.fileno())
    except (OSError, ValueError):
        return None


def _has_lost_reader(exit_: SystemExit, stdout: os.stat_result | None) -> bool:
    """Whether click or rich exited with code 1 because nobody reads stdout any more. A reader that
    stops early is not a failure; another broken pipe or socket is one.

    stdout: its state at the start; rich replaces a broken stdout by the null device."""
    now = _stdout_status()
    if stdout is None or now is None or not isinstance(exit_.__context__, BrokenPipeError):
        return False
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return not os.path.samestat(stdout, now) or any(e & select.POLLERR for _, e in poll.poll(0))


def _report(issues: Any, wants_json: bool, error: MpctlError | None) -> int:
    from mpctl.render.output import print_issues

    print_issues(list(issues), wants_json=wants_json)
    return error.exit_code if error else 2
