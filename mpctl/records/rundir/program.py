"""Command line and environment variables of the ranks of a program (`launch.program`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mpctl.model.layout.topology import job_topology
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.heartbeat import HEARTBEAT, RECORDS, STOP
from mpctl.spec.job import JobSpec

ATTEMPT, RUN_DIR = "MPCTL_ATTEMPT", "MPCTL_RUN_DIR"
"""Environment variables of a program's rank: how often this run was started before, and the run
directory, without links."""
LONGEST_GROUP = 4096
"""Members of a group up to which they are listed in a variable: an environment variable has at most
128 KiB."""


def script_words(argv: Sequence[str]) -> list[str] | None:
    """The words after `python` where the program is a script or a module of the Python that runs
    mpctl; None for any other program, and for options of the interpreter.

    >>> script_words(["python", "-u", "-m", "train", "--lr", "1"])
    ['-m', 'train', '--lr', '1']
    >>> script_words(["python", "-c", "pass"]), script_words(["./train.sh"])
    (None, None)
    """
    first, *words = argv
    if first not in ("python", "python3", sys.executable):
        return None
    if words[:1] == ["-u"]:  # as PYTHONUNBUFFERED, which every rank has
        words = words[1:]
    is_module = words[:1] == ["-m"] and len(words) > 1
    return words if is_module or (words and words[0][:1] not in ("-", "")) else None


def recording_ranks(job: JobSpec) -> tuple[int, ...]:
    """The ranks whose losses are recorded: 0, and in a pipeline the first of the last stage, where
    the loss is computed."""
    topology = job_topology(job)
    return tuple(sorted({0, topology.rank(pp=topology.sizes["pp"] - 1)}))


def program_variables(run: RunDir, job: JobSpec, rank: int) -> dict[str, str]:
    """The variables of a rank in addition to torchrun's: where its files are, and its place in the
    plan: MPCTL_TP_RANK, MPCTL_TP_SIZE and MPCTL_TP_GROUP (`0,1`) for each axis."""
    topology, run = job_topology(job), RunDir(run.path.resolve())
    variables = {
        RUN_DIR: str(run.path),
        "MPCTL_PLAN": str(run.plan),
        "MPCTL_CHECKPOINT_DIR": str(run.program_checkpoints),
        HEARTBEAT: str(run.heartbeat(rank)),
        STOP: str(run.program_stop(rank)),
        RECORDS: str(int(rank in recording_ranks(job))),
    }
    for axis, at in topology.whole_coords(rank).items():
        group, name = topology.group(rank, axis), f"MPCTL_{axis.upper()}"
        variables |= {f"{name}_RANK": str(at), f"{name}_SIZE": str(len(group))}
        if len(group) <= LONGEST_GROUP:
            variables[f"{name}_GROUP"] = ",".join(map(str, group))
    return variables
