"""A program of the user's own in place of mpctl's training: what a launch checks of it, and its
words with the plan's flags.

`{megatron}` as a word of the program becomes the flags that `mpctl plan --emit megatron` prints,
each a word of its own, without a shell. For launchers that read a file, such as `{torchtitan}` or
`{nanotron}`, the text is written to RUN/program, and the placeholder becomes its path. `{torchtitan}`
is a script: `python {torchtitan}` trains. `{accelerate}` by itself is left out, since its variables
say it all.

What only mpctl's own workers do is refused where the job asks for it (ONLY_OWN), since nothing
would happen; settings that the plan alone reads are a warning.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from mpctl.core.errors import InputError, Issue
from mpctl.interop.emitted import EmittedPlan, emit_plan, get_launcher
from mpctl.interop.registry import TARGETS
from mpctl.plan.planning.plan import Plan
from mpctl.plan.rules.check import listed
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.program import script_words
from mpctl.run.launch.node.torchrun import RANK_VARIABLES
from mpctl.spec.job import JobSpec

SETTING = "launch.program"
PLACEHOLDER = re.compile(r"\{(" + "|".join(map(re.escape, TARGETS)) + r")\}")
ANY_PLACEHOLDER = re.compile(r"(?:[^{]*=)?\{([a-z][a-z0-9_-]*)\}")
ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
SUFFIXES = {"python": "py", "yaml": "yaml", "shell": "sh"}
ONLY_OWN = {
    "launch.elastic": "the layout of a running program cannot be changed",
    "launch.profile": "a program records no traces of mpctl; use its own profiler",
    "launch.compile": "a program compiles its own model",
    "training.init_from": "a program reads its own weights",
    "training.on_nonfinite": "a program handles its own losses",
    "training.on_spike": "a program handles its own losses",
    "training.skip_batches": "a program reads its own data",
    "training.freeze": "a program chooses what it trains",
}
"""Settings that only mpctl's own workers follow, and why a program does not."""
NOT_READ = ("data", "checkpoint")
FLAGS_OF_PLAN = "add the placeholder of its trainer, such as {megatron}, for the plan's flags"


class ProgramWords(NamedTuple):
    """A program with the plan's flags. argv: its words; files: texts to write into the run
    directory, by name; env: variables that the flags need; variables: those by which it gets the plan."""

    argv: list[str]
    files: dict[str, str]
    env: dict[str, str]
    variables: dict[str, str]


def program_words(plan: Plan, run: RunDir) -> ProgramWords:
    """The words of a legal plan's program. Raises InputError with every setting of the plan that a
    named launcher cannot say."""
    argv: list[str] = []
    env: dict[str, str] = {}
    emitted = {name: emit_plan(plan, name) for name in _named(plan.job)}
    for word in plan.job.launch.program:
        target = PLACEHOLDER.fullmatch(word)
        if target and emitted[target[1]].is_flags:
            needed, flags = flags_of(emitted[target[1]])
            argv.extend(flags)
            env.update(needed)
            continue
        if target and emitted[target[1]].variables and not emitted[target[1]].config:
            continue
        argv.append(PLACEHOLDER.sub(lambda found: str(_path(run, emitted[found[1]])), word))
    written = (text for text in emitted.values() if not text.is_flags)
    files = {f"program/{_file(text)}": (text.config or text.text) + "\n" for text in written}
    variables = {key: value for text in emitted.values() for key, value in text.variables.items()}
    return ProgramWords(argv, files, env, variables)


def flags_of(emitted: EmittedPlan) -> tuple[dict[str, str], list[str]]:
    """The variables and the flags of a plan that was written as a command line: the words before
    the launcher, and those after the script."""
    words = shlex.split(emitted.body.replace("\\\n", " "), comments=True)
    script = next((n for n, word in enumerate(words) if word.endswith(".py")), -1)
    found = (ASSIGNMENT.fullmatch(word) for word in words[: max(0, script)])
    env = {match[1]: match[2] for match in found if match and match[1] in RANK_VARIABLES}
    return env, words[script + 1 :]


def _named(job: JobSpec) -> list[str]:
    """Return the launchers that the program names by placeholders."""
    found = (name for word in job.launch.program for name in PLACEHOLDER.findall(word))
    return list(dict.fromkeys(found))


def _file(emitted: EmittedPlan) -> str:
    """The name of the file; that of a module would hide the module from a file that is run."""
    suffix = "json" if emitted.config else SUFFIXES[emitted.language]
    return f"{emitted.target.replace('-', '_')}_plan.{suffix}"


def _path(run: RunDir, emitted: EmittedPlan) -> Path:
    return run.program.resolve() / _file(emitted)


def program_issues(plan: Plan, *, is_elsewhere: bool) -> Iterator[Issue]:
    """Every reason why the job's program could not run. is_elsewhere: its files are not on this
    machine."""
    job = plan.job
    yield from _refused(job)
    yield from _placeholder_issues(plan)
    if not is_elsewhere and not _is_of_image(job):
        yield from _missing(job.launch.program, Path(job.launch.program_dir or "."))


def _is_of_image(job: JobSpec) -> bool:
    """Whether only the pods can tell if the program is there: all but a script on the claim."""
    mount, words = job.launch.kubernetes.mount_path, script_words(job.launch.program)
    if job.launch.on != "kubernetes" or mount is None:
        return False
    if words is None or words[0] == "-m" or PLACEHOLDER.fullmatch(words[0]):
        return True
    script = Path(job.launch.program_dir or ".", words[0]).absolute()
    return not script.is_relative_to(mount)


def _refused(job: JobSpec) -> Iterator[Issue]:
    for where, why in ONLY_OWN.items():
        name, _, key = where.partition(".")
        table: BaseModel = getattr(job, name)
        if _is_set(table, key):
            value = getattr(table, key)
            yield Issue(
                "program-only-own",
                where,
                f"{value!r} is for mpctl's own workers: {why}",
                f"leave it out, or leave {SETTING} out",
            )


def _placeholder_issues(plan: Plan) -> Iterator[Issue]:
    for word in plan.job.launch.program:
        for name in PLACEHOLDER.findall(word):
            if get_launcher(name).is_flags and word != f"{{{name}}}":
                message = f"{word!r} has {{{name}}} inside of a word, and it becomes several"
                yield Issue("program-placeholder", SETTING, message, f"write {{{name}}} by itself")
        unknown = ANY_PLACEHOLDER.fullmatch(word)
        if unknown and unknown[1] not in TARGETS:
            known = listed([f"{{{name}}}" for name in TARGETS])
            yield Issue("program-placeholder", SETTING, f"{word!r} is no placeholder of a plan", f"use {known}")
    for name in _named(plan.job):
        try:
            emit_plan(plan, name)
        except InputError as error:
            yield from error.issues


def _missing(argv: Sequence[str], folder: Path) -> Iterator[Issue]:
    """Yield the issue if the first words name nothing that can be run from this folder."""
    if not folder.is_dir():
        message = f"{folder} is not a folder of this host"
        hint = "name the folder in which the program is to run"
        yield Issue("no-such-folder", "launch.program_dir", message, hint)
        return
    words = script_words(argv)
    if words is None:
        name = argv[0]
        is_python = name in ("python", "python3")
        path = str(folder.absolute() / name) if "/" in name else name
        if not is_python and (not name or shutil.which(path) is None):
            hint = f"write python {name}" if name.endswith(".py") else "give its path"
            message = f"{name!r} is not a program that can be run here"
            yield Issue("no-such-program", SETTING, message, hint)
    elif words[0] == "-m":
        top = words[1].partition(".")[0]
        if PathFinder.find_spec(top, [str(folder.absolute()), *sys.path]) is None:
            yield Issue(
                "no-such-program",
                SETTING,
                f"there is no module {top!r} here",
                "install it for the Python that runs mpctl, or name another Python by its path",
            )
    elif not PLACEHOLDER.fullmatch(words[0]) and not (folder / words[0]).exists():
        yield Issue(
            "no-such-program",
            SETTING,
            f"{folder.absolute() / words[0]} does not exist",
            "start mpctl in the folder of the script, or give its path",
        )


def program_warnings(job: JobSpec) -> Iterator[str]:
    """Yield warnings about settings of the job that the program does not read."""
    names = [
        f"{name}.{key}"
        for name in NOT_READ
        for key in type(getattr(job, name)).model_fields
        if _is_set(getattr(job, name), key)
    ]
    if names:
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        yield f"the program does not read {shown}: only mpctl's own workers do"
    if not _named(job) and job.model is not None:
        yield (
            "the program gets the plan's layout as variables (MPCTL_TP_SIZE, ...), and neither its "
            f"model nor its training; {FLAGS_OF_PLAN}"
        )


def _is_set(table: BaseModel, key: str) -> bool:
    """Whether a setting differs from its default."""
    default = type(table).model_fields[key].get_default(call_default_factory=True)
    return bool(getattr(table, key) != default)
