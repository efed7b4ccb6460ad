"""Variables of the shell that Slurm's commands read as options.

sbatch ranks them above the `#SBATCH` lines of a script: with SBATCH_PARTITION=short, which a site's
profile may set, `#SBATCH --partition=main` is ignored. A setting of the job goes first here, so
that what was checked is what runs:

    job            shell                    job's script         passed on to sbatch
    partition=main SBATCH_PARTITION=short   --partition=main     no, and a line says so
    no account     SBATCH_ACCOUNT=physics   --account=physics    no: the script has it
    nothing of it  SBATCH_RESERVATION=r     nothing              yes

Source: man sbatch, INPUT ENVIRONMENT VARIABLES, of Slurm 22.05.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from mpctl.core.errors import InputError
from mpctl.run.clusters.slurm.script import GPU_OPTIONS, MEMORY_OPTIONS, SET_BY, UNFIT, read_option
from mpctl.spec.launch import SlurmSpec

PREFIX = "SBATCH_"
ADOPTED = {
    "partition": "SBATCH_PARTITION",
    "account": "SBATCH_ACCOUNT",
    "time": "SBATCH_TIMELIMIT",
    "qos": "SBATCH_QOS",
    "constraint": "SBATCH_CONSTRAINT",
}
"""Settings of [launch.slurm] that a variable fills in where the job leaves them open."""
IRREGULAR = {
    "SBATCH_TIMELIMIT": "--time",
    "SBATCH_ARRAY_INX": "--array",
    "SBATCH_MEM_PER_NODE": "--mem",
    "SBATCH_REQ_SWITCH": "--switches",
    "SBATCH_DEBUG": "--verbose",
}
"""Options of variables; all others are those of their names: SBATCH_JOB_NAME is --job-name."""
SHORT = {
    "-m": "--distribution",
    "-M": "--clusters",
    "-S": "--core-spec",
    "-O": "--overcommit",
    "-i": "--input",
    "-k": "--no-kill",
    "-v": "--verbose",
}
"""Options that have a variable and no setting, by their letters."""
OF_QUERIES = ("SINFO_", "SQUEUE_", "SCANCEL_")
"""Variables that would filter what sinfo and squeue list, or what scancel ends."""


def with_shell(settings: SlurmSpec, shell: Mapping[str, str]) -> SlurmSpec:
    """The settings, with those of the shell where the job leaves them open. Raises InputError for
    a value that cannot stand in a script."""
    found = {key: shell[name] for key, name in ADOPTED.items() if getattr(settings, key) is None and shell.get(name)}
    for key, value in found.items():
        if re.search(r"[\s\x00-\x1f\x7f]", value):
            message = f"{value!r} has a space or a control character"
            hint = f"correct it, or set launch.slurm.{key}, which goes first"
            raise InputError.of("bad-value", ADOPTED[key], message, hint)
    return settings.model_copy(update=found)


def overriding(options: Iterable[str], shell: Mapping[str, str]) -> dict[str, str]:
    """The variables by which sbatch would do other than a script with these options says, or print
    other than its job's id; each with its value."""
    written = _values(options)
    named = {*written, *UNFIT, *(option for names in SET_BY.values() for option in names)}
    for group in (GPU_OPTIONS, MEMORY_OPTIONS):
        if group & written.keys():
            named |= group
    return {name: value for name, value in shell.items() if name.startswith(PREFIX) and _option(name) in named}


def ignored_text(options: Sequence[str], shell: Mapping[str, str]) -> str | None:
    """Return one line on the variables that are not passed on; None if none contradicts the script."""
    written = _values(options)
    other = [
        f"{name}={value}"
        for name, value in overriding(options, shell).items()
        if written.get(_option(name)) not in ("", value)
    ]
    return f"the job's settings go before {', '.join(other)} of this shell" if other else None


def _option(variable: str) -> str:
    """`SBATCH_JOB_NAME` -> `--job-name`."""
    words = variable.removeprefix(PREFIX).lower().replace("_", "-")
    return IRREGULAR.get(variable, f"--{words}")


def _values(options: Iterable[str]) -> dict[str, str]:
    """The values of options as script.py writes them, by their long names."""
    read = (option for text in options if (option := read_option(text)) is not None)
    return {SHORT.get(one.name, one.name): " ".join(shlex.split(one.value)) for one in read}
