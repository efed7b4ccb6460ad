"""Several runs of one job as a Slurm array: `launch.slurm.array`.

Each task of the array is a run like any other, with its own directory, FOLDER/task-N, and the
batch script that it would have alone (script.py). The script of the array, FOLDER/slurm.sh, has the
options of these scripts and runs that of its task. A task has a job id of its own, so that it is
requeued, shown and stopped without the others.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mpctl.core.errors import Issue
from mpctl.run.clusters.slurm.script import BatchJob, script_options
from mpctl.spec.launch import SlurmSpec
from mpctl.spec.names import full_name

WHERE = "launch.slurm.array"
OF_THE_JOB = ("cluster", "launch", "name", "preset")
"""Tables of a job that all tasks of an array share: they are in the options of sbatch."""


def task_folder(folder: Path, number: int) -> Path:
    """The directory of the run of a task."""
    return folder / f"task-{number}"


def task_settings(table: Mapping[str, object]) -> dict[str, object]:
    """The settings of a task by their full names; its run is no array."""
    return {**{full_name(key): value for key, value in table.items()}, WHERE: []}


def array_issues(settings: SlurmSpec) -> Iterator[Issue]:
    """Settings that may not differ between the tasks of an array."""
    for number, table in enumerate(settings.array):
        for key in table:
            name = full_name(key)
            if name.split(".")[0] in OF_THE_JOB:
                message = f"task {number} sets {name}, which all tasks share"
                hint = "set it for the whole job, or submit the runs one by one"
                yield Issue("slurm-array", WHERE, message, hint)


def render_array(tasks: Sequence[BatchJob], folder: Path, words: Sequence[str]) -> str:
    """The script of the array. tasks: the scripts of its runs; folder: of the array, an absolute
    path; words: a line about each task, without line breaks.

    The time to save before the limit is the longest of any task.
    """
    first = max(tasks, key=lambda task: task.signal_seconds)
    own = ("--job-name=", "--output=")
    limit = "" if first.settings.array_limit is None else f"%{first.settings.array_limit}"
    options = [
        f"--job-name={shlex.quote(folder.name if first.name == first.run.name else first.name)}",
        f"--array=0-{len(tasks) - 1}{limit}",
        *(option for option in script_options(first) if not option.startswith(own)),
        f"--output={shlex.quote(str(folder).replace('%', '%%') + '/task-%a/logs/slurm-%A_%a.out')}",
    ]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options), ""]
    lines += [f"# {line}" for line in words]
    script = f'{shlex.quote(str(folder))}/task-"$SLURM_ARRAY_TASK_ID"/slurm.sh'
    return "\n".join([*lines, f"exec /bin/bash {script}", ""])
