"""`--via ssh:HOST`: a command that runs on a login host and answers here."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from mpctl.cli.options import FLAGS, JobSource

if TYPE_CHECKING:
    from mpctl.core.errors import Issue
    from mpctl.run.clusters.ssh.login import Passed
    from mpctl.spec.job import JobSpec

ViaOption = Annotated[
    str | None,
    typer.Option(
        "--via",
        metavar="ssh:HOST",
        help="Run the command on this login host, over ssh; ssh:HOST:PYTHON names its Python with "
        "mpctl. Paths are those of the host.",
        show_default=False,
    ),
]
VIA = "MPCTL_VIA"
"""Environment variable of a command on a login host: the value of --via, for what it prints."""
OF_THE_JOB = frozenset(
    {
        *(flag.name for flag in FLAGS),
        "job",
        "set_",
        "gpus",
        "from_",
        "fetch",
        "device",
        "tensorboard",
        "csv",
        "profile",
        "on",
        "hostfile",
        "include",
        "exclude",
    }
)
"""Parameters of `mpctl launch` that make the job, which is sent with all of them in it."""


def run_there(
    via: str, context: typer.Context, *, job: JobSpec | None = None, without: Collection[str] = ()
) -> NoReturn:
    """Run the command that was typed on a login host, and exit with its exit code. job: what it
    gets as the job `-`; without: parameters that are not passed on."""
    from mpctl.run.clusters.ssh.login import RelayRequest, read_login, relay

    login = read_login(via)
    tables = None if job is None else job.model_dump(mode="json", exclude_unset=True)
    options, words = _typed(context, {"via", *without})
    _require_text([*options, *words])
    request = RelayRequest(
        arguments=[str(context.info_name), *options, "--", *([] if job is None else ["-"]), *words],
        job=tables,
        # A scheduler would pass them on to the job, whose output is a file.
        environment={} if context.info_name == "launch" else _of_this_terminal(),
        via=via,
    )
    try:
        code = relay(login, request, os.environ)
    except BrokenPipeError:  # `mpctl logs --via ssh:login RUN | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    raise typer.Exit(code)


def submit_there(
    via: str, context: typer.Context, job: JobSource, run_dir: Path | None, *, submit: bool, resume: bool
) -> NoReturn:
    """Check a job as far as that is possible here, and let a login host submit it."""
    from mpctl.core.errors import InputError, Issue
    from mpctl.run.clusters.registry import find_submitter
    from mpctl.run.launch.preflight import runtime_issues
    from mpctl.spec.load import load_as_written

    issues = []
    if not submit:
        message = "a login host submits runs, and does not train them"
        issues.append(Issue("usage", "--via", message, "add --submit"))
    if run_dir is None:
        message = "no directory is named for the run on the login host"
        issues.append(Issue("no-run-dir", "--run-dir", message, "add --run-dir PATH_THERE"))
    if issues:
        raise InputError(issues)
    if resume and job.source is None:  # the job is in the run directory
        run_there(via, context)
    written = load_as_written(job.source, job.overrides)
    if issues := _unreachable(written):
        raise InputError(issues)
    plan = job.plan()
    find_submitter(plan.job, {})
    if issues := [] if resume else list(runtime_issues(plan)):
        raise InputError(issues)
    run_there(via, context, job=written, without=OF_THE_JOB)


def _unreachable(job: JobSpec) -> list[Issue]:
    """What a job names that lies on this machine alone, or would there mean something else."""
    from mpctl.core.errors import Issue
    from mpctl.run.clusters.backend import paths_read
    from mpctl.spec.paths import PYTHON_STDLIB
    from mpctl.spec.presets import find_file

    paths = [*paths_read(job).items(), ("data.tokenizer", job.data.tokenizer)]
    paths += [("data.corpus", path) for path in job.data.corpus or ()]
    issues = []
    for setting, path in dict.fromkeys(paths):
        if path is not None and path != PYTHON_STDLIB and not Path(path).is_absolute():
            message = f"{path!r} is relative to a folder of this machine"
            hint = "give the absolute path of the data on the cluster"
            issues.append(Issue("via-path", setting, message, hint))
    runtime = find_file("runtimes", job.training.runtime)
    if runtime is not None and not runtime.is_bundled:
        message = f"{job.training.runtime} is a preset of this machine"
        hint = "use a bundled runtime, or copy the preset to the login host and submit there"
        issues.append(Issue("via-preset", "training.runtime", message, hint))
    return issues


def _require_text(words: Iterable[str]) -> None:
    """Raises InputError for a word that cannot be sent as JSON."""
    from mpctl.core.errors import InputError

    for word in words:
        if "\0" in word or any("\ud800" <= letter <= "\udfff" for letter in word):
            message = f"{word!r} is not text in UTF-8"
            raise InputError.of("via-text", "command line", message, "use a name in UTF-8")


def _typed(context: typer.Context, without: Collection[str]) -> tuple[list[str], list[str]]:
    """The options and the arguments of the command line, so that a value is never read as an
    option."""
    options: list[str] = []
    words: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name in without or source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        values = list(value) if isinstance(value, list | tuple) else [value]
        if parameter.param_type_name == "argument":
            words += map(str, values)
            continue
        long = next(option for option in parameter.opts if option.startswith("--"))
        if isinstance(value, bool):
            options.append(long if value else parameter.secondary_opts[0])
        else:
            options += [f"{long}={one}" for one in values]
    return options, words


def _of_this_terminal() -> dict[Passed, str]:
    """Width and colours of this terminal; as in a pipe where stdout is none."""
    from typing import get_args

    from mpctl.run.clusters.ssh.login import Passed

    found: dict[Passed, str] = {name: os.environ[name] for name in get_args(Passed) if name in os.environ}
    if sys.stdout.isatty():
        found.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
        if sys.stderr.isatty():
            found.setdefault("FORCE_COLOR", "1")
    return found
