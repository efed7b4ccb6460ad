"""Ranks in a container: the options of srun, and the command in front of a node's agent.

    pyxis       NVIDIA's plugin of Slurm: `srun --container-image=IMAGE --container-mounts=A:A,B:B`
                starts the step's tasks in the image, by enroot
    apptainer   `apptainer exec --bind A,B IMAGE COMMAND`, with --nv for NVIDIA's driver; the tasks
                are started on the host

The launcher runs outside of the container, where srun is, and needs no torch. The folders that the
ranks read and write are mounted at the paths that they have on the host, since the records of a run
hold absolute paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from mpctl.core.errors import Issue
from mpctl.run.clusters.backend import paths_read
from mpctl.run.clusters.slurm.script import read_options, step_issues
from mpctl.run.hosts.checks import named_device
from mpctl.spec.job import JobSpec
from mpctl.spec.launch import SlurmSpec


def step_options(job: JobSpec, run: Path) -> list[str]:
    """The options of srun beyond those that the allocation gives."""
    settings = job.launch.slurm
    options = [part for option in read_options(settings.srun) for part in option.arguments]
    if settings.container == "pyxis":
        mounts = [one if ":" in one else f"{one}:{one}" for one in _mounts(job, run)]
        options += [f"--container-image={settings.container_image}", f"--container-mounts={','.join(mounts)}"]
    return options


def wrapped(job: JobSpec, run: Path, python: str, arguments: Sequence[str]) -> list[str]:
    """The command that starts Python with these arguments on a node. python: the launcher's."""
    settings = job.launch.slurm
    if settings.container == "none":
        return [python, *arguments]
    inside = [settings.container_python, *arguments]
    if settings.container == "pyxis":
        return inside
    driver = [] if named_device(job) == "cpu" else ["--nv"]
    bound = ",".join(_mounts(job, run))
    return ["apptainer", "exec", *driver, "--bind", bound, settings.container_image or "", *inside]


def _mounts(job: JobSpec, run: Path) -> list[str]:
    """The folders that the container sees: of the run, of what its ranks read, and further ones."""
    read = (_folder(Path(path).absolute()) for path in paths_read(job).values())
    return list(dict.fromkeys([str(run), *map(str, read), *job.launch.slurm.container_mounts]))


def _folder(path: Path) -> Path:
    """A file's folder: prepared data are several files with one beginning."""
    return path if path.is_dir() else path.parent


def container_issues(settings: SlurmSpec) -> Iterator[Issue]:
    """Yield all issues of the settings of the container and of srun."""
    yield from step_issues(settings.srun)
    where = "launch.slurm.container"
    if settings.container == "none":
        if settings.container_image is not None:
            yield Issue(
                "slurm-container",
                where,
                "an image is named, but not what runs it",
                "use --set launch.slurm.container=pyxis, or apptainer",
            )
        return
    if settings.container_image is None:
        yield Issue(
            "slurm-container",
            where,
            f"{settings.container} without an image",
            "use --set launch.slurm.container_image=...",
        )
    for mount in settings.container_mounts:
        paths = mount.split(":")
        if len(paths) > 2 or "," in mount or not all(PurePosixPath(p).is_absolute() for p in paths):
            message = f"{mount!r} is not an absolute path, or PATH:PATH_INSIDE"
            yield Issue("slurm-container", f"{where}_mounts", message, "use a form such as /data")
