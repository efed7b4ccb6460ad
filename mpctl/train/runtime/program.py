"""A rank of somebody else's trainer: `python -m mpctl.train.runtime.program RUN`, started by torchrun.

Reads the job from RUN/job.json and runs `launch.program` in its place: a program of this Python in
this same process, so that its stacks can be read and its exception is known; any other program by
exec. In both cases the process keeps its id, its log and its end together with its parent.

`python` is the Python that runs mpctl on this host, as with torchrun: `python train.py` and
`python -m package` run here, `python -c` and other options in a fresh one. Another Python is named
by its path.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from mpctl.core.errors import RunFailed
from mpctl.core.topology import Topology
from mpctl.records.rundir.breadcrumb import JOINED, STACK_SIGNAL, TORCHRUN, Breadcrumb, rank_memory, read_breadcrumb
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.origin import ORIGIN
from mpctl.records.rundir.program import program_variables, script_words
from mpctl.spec.job import JobSpec
from mpctl.train.runtime.process import (
    die_with_parent,
    end_beside_gloo,
    failure_record,
    redirect_output,
    write_stacks_on_signal,
)
from mpctl.train.runtime.worker import RankEnv

HIDDEN = (__file__, "<frozen runpy>")


def main(run: RunDir) -> None:
    """Run the program of one rank; leaves a record of the exception that ends it."""
    die_with_parent(int(os.environ.get(TORCHRUN, os.getppid())))
    rank_env = RankEnv.from_environment()
    redirect_output(run.log(rank_env.rank))
    write_stacks_on_signal()
    breadcrumb = Breadcrumb(rank_memory(rank_env.rank, os.environ))
    from mpctl.model.layout.topology import job_topology
    from mpctl.spec.load import parse

    breadcrumb.write("waiting for job.json as the launcher wrote it")
    job = parse(json.loads(rank_env.origin.read_job(run.job)))
    topology = job_topology(job)
    try:
        prepare(run, job, rank_env.rank)
        breadcrumb.reach(JOINED, "running the program")
        run_program(job)
    except SystemExit as error:
        if error.code:
            if isinstance(error.code, str):
                _record(breadcrumb, RunFailed(error.code), topology, rank_env.rank)
            raise
    except BaseException as error:
        _record(breadcrumb, error, topology, rank_env.rank)
        if isinstance(error, RunFailed):
            sys.exit(str(error))
        error.__traceback__ = _of_program(error.__traceback__)
        raise
    breadcrumb.end(read_breadcrumb(bytes(breadcrumb.memory)).doing)
    end_beside_gloo()


def prepare(run: RunDir, job: JobSpec, rank: int) -> None:
    """Set the program's variables and go to its directory. Raises RunFailed where that is not on
    this host."""
    for name in ("PYTHONSAFEPATH", *ORIGIN):  # of mpctl's own ranks; a script imports neighbours
        os.environ.pop(name, None)
    os.environ.update({**job.launch.program_env, **program_variables(run, job, rank)})
    try:
        os.chdir(job.launch.program_dir or ".")
    except OSError as error:
        where = f"the program's directory {job.launch.program_dir}"
        raise RunFailed(f"{where} cannot be used on this host: {error.strerror}") from None


def run_program(job: JobSpec) -> None:
    """Run the program to its end; does not return where it is another executable. Raises whatever
    a script raises, RunFailed for a program that cannot be run."""
    argv = job.launch.program_argv or job.launch.program
    words = script_words(argv)
    if words is not None:
        run_python(words)
        return
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # exec would leave it as the end of the process
    sys.stdout.flush()
    name = sys.executable if argv[0] in ("python", "python3") else argv[0]
    try:
        os.execvp(name, [name, *argv[1:]])
    except OSError as error:
        raise RunFailed(f"{argv[0]} cannot be run: {error.strerror}") from None


def run_python(words: Sequence[str]) -> None:
    """Run a script, or a module after `-m`, as `python WORDS` does, in this process."""
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:], script = words, Path(words[0]).absolute()
    if script.is_file():  # a folder or an archive is put there by runpy
        sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


def _record(breadcrumb: Breadcrumb, error: BaseException, topology: Topology, rank: int) -> None:
    doing = read_breadcrumb(bytes(breadcrumb.memory)).doing
    coords = topology.whole_coords(rank)
    breadcrumb.fail(failure_record(error, rank=rank, coords=coords, doing=doing))


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's first line on."""
    while trace is not None and trace.tb_frame.f_code.co_filename in HIDDEN:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main(RunDir(Path(sys.argv[1])))
