"""Choice of a job's backend: by `--on` (launch.on), or by the environment of this process."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from mpctl.core.errors import InputError
from mpctl.run.clusters.backend import Backend, Scheduler, Submitter
from mpctl.run.clusters.slurm.allocation import is_in_allocation
from mpctl.run.clusters.torchrun.world import find_world
from mpctl.spec.job import JobSpec

BACKENDS = {
    "local": "mpctl.run.clusters.local:LocalBackend",
    "ssh": "mpctl.run.clusters.ssh.backend:SshBackend",
    "torchrun": "mpctl.run.clusters.torchrun.backend:TorchrunBackend",
    "slurm": "mpctl.run.clusters.slurm.backend:SlurmBackend",
}
"""The class of each backend that runs a plan while `mpctl launch` waits, by name. Its arguments are
the job and the environment of this process."""
SUBMITTERS = {
    "slurm": "mpctl.run.clusters.slurm.submission:SlurmSubmitter",
    "kubernetes": "mpctl.run.clusters.kubernetes.submission:KubernetesSubmitter",
}
"""The class of each scheduler that a run can be submitted to; same arguments."""
SCHEDULERS = {
    "slurm": "mpctl.run.clusters.slurm.commands:SlurmScheduler",
    "kubernetes": "mpctl.run.clusters.kubernetes.jobs:KubernetesScheduler",
}
"""The class that manages the submitted jobs of a backend; its argument is the job of the run."""


def find_backend(job: JobSpec, environment: Mapping[str, str]) -> Backend:
    """The backend of a job. Raises InputError for one that only takes submissions."""
    name = chosen_name(job, environment)
    if name not in BACKENDS:
        hint = "add --submit" if name in SUBMITTERS else f"use --on {', '.join(BACKENDS)}"
        raise InputError.of("backend-unknown", "--on", f"{name} does not run a job here", hint)
    backend: Backend = _load(BACKENDS[name])(job, environment)
    return backend


def find_submitter(job: JobSpec, environment: Mapping[str, str]) -> Submitter:
    """The scheduler that --submit uses. Raises InputError for a backend that has none."""
    name = chosen_name(job, environment)
    if name not in SUBMITTERS:
        hint = f"use --on {', '.join(SUBMITTERS)}, or leave out --submit"
        raise InputError.of("nothing-to-submit", "--submit", f"--on {name} submits nothing", hint)
    submitter: Submitter = _load(SUBMITTERS[name])(job, environment)
    return submitter


def find_scheduler(backend: str, job: JobSpec) -> Scheduler | None:
    """The scheduler of a backend, by its name in RUN/launcher.json; None for a backend that submits
    no jobs."""
    if backend not in SCHEDULERS:
        return None
    scheduler: Scheduler = _load(SCHEDULERS[backend])(job)
    return scheduler


def chosen_name(job: JobSpec, environment: Mapping[str, str]) -> str:
    """The name of the backend: that of the job, or the one that the environment suggests."""
    if job.launch.on != "auto":
        return job.launch.on
    if find_world(environment):
        return "torchrun"
    return "slurm" if is_in_allocation(environment, job.cluster.nodes) else "local"


def _load(name: str) -> type:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)  # type: ignore[no-any-return]
