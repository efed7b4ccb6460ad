"""`mpctl doctor`: examine every host and find what would break a launch there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpctl.cli.launch import ExcludeOption, HostfileOption, IncludeOption, OnOption, ssh_settings
from mpctl.cli.options import AsJsonOption, JobSource, with_job

if TYPE_CHECKING:
    from mpctl.core.errors import Issue
    from mpctl.plan.planning.plan import Plan
    from mpctl.run.clusters.backend import Backend
    from mpctl.run.doctor.documents import Diagnosis
    from mpctl.run.doctor.examine import Progress
    from mpctl.run.doctor.hosts import Hosts
    from mpctl.run.doctor.job import Needs
    from mpctl.run.hosts.machine import Machine
    from mpctl.run.launch.cluster import Cluster


RunDirOption = Annotated[Path, typer.Option(help="Directory for runs; checks whether ranks can write there, how fast.")]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(help="Where ranks would run; by default as the job says.", show_default=False),
]
CollectivesOption = Annotated[
    bool, typer.Option("--collectives", help="Also time all-reduces of torch, by gloo or NCCL.")
]
RedactOption = Annotated[
    bool, typer.Option("--redact", help="Replace names of hosts and users, addresses, home folders.")
]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print Markdown to paste into a bug report.")]


@with_job
def doctor(
    job: JobSource,
    run_dir: RunDirOption = Path("runs"),
    device: DeviceOption = None,
    on: OnOption = None,
    hostfile: HostfileOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    collectives: CollectivesOption = False,
    redact: RedactOption = False,
    markdown: MarkdownOption = False,
    as_json: AsJsonOption = False,
) -> None:
    """Examine every host: software, devices, memory, network.

    Also limits, the run directory and the speed of links. With JOB, also check whether its launch would start.
    Exit code 1 when something would break a launch; every finding comes with a fix. Nothing is left behind on
    any host.
    """
    from mpctl.run.doctor.redact import redact as redacted

    settings = {"launch.on": on, "launch.device": device}
    job = job.with_settings({**settings, **ssh_settings(on, hostfile, include, exclude)})
    diagnosis = question_of(job, run_dir, collectives=collectives).answer()
    shown = redacted(diagnosis) if redact else diagnosis
    if as_json:
        from mpctl.render.output import print_json

        print_json(shown.model_dump(by_alias=True))
    elif markdown:
        from mpctl.render.doctor import print_markdown

        print_markdown(shown)
    else:
        from mpctl.render.doctor import print_diagnosis

        print_diagnosis(shown)
    raise typer.Exit(1 if diagnosis.has_errors else 0)


ABOUT_HOSTS = ("launch.", "cluster.nodes", "cluster.gpus_per_node")
ELSEWHERE = {
    "kubernetes": "run it in the pods: kubectl exec POD -- mpctl doctor",
    "torchrun": "run `mpctl doctor --on local` in each of its processes",
}


@dataclass(frozen=True)
class Question:
    """What the hosts are examined for. plan: that of the job, or of its hosts alone where no job is
    named; name: that of the job, None without one."""

    plan: Plan
    name: str | None
    run_dir: Path
    collectives: bool

    def answer(self) -> Diagnosis:
        """Connect to the hosts and examine them, with a progress bar. If hosts cannot be used, that
        is the only finding."""
        from mpctl.cli.signals import ended_by_signals
        from mpctl.core.errors import InputError
        from mpctl.render.progress import TaskBar
        from mpctl.run.clusters.registry import find_backend
        from mpctl.run.doctor.documents import of_issues
        from mpctl.run.doctor.hosts import connected_hosts

        backend = find_backend(self.plan.job, os.environ)
        with ended_by_signals("nothing is left behind"), TaskBar() as bar:
            bar.update("connecting", 0, 0)
            try:
                with connected_hosts(backend, self.plan, self.run_dir, bar.print) as hosts:
                    return self._examined(backend, hosts, bar.update)
            except InputError as error:
                return of_issues(error.issues, backend=backend.name, job=self.name)

    def _examined(self, backend: Backend, hosts: Hosts, on_progress: Progress) -> Diagnosis:
        """Examine the hosts, and add the reasons for which a launch of the job would be refused."""
        from mpctl.run.doctor.documents import with_issues
        from mpctl.run.doctor.examine import Examination, examine

        wanted = Examination(backend.name, self.run_dir, self._needs(hosts.cluster), self.name, self.collectives)
        diagnosis = examine(hosts, wanted, on_progress)
        if self.name is None:
            return diagnosis
        return with_issues(diagnosis, self._refusals(backend, hosts.cluster))

    def _machine(self, cluster: Cluster | None) -> Machine:
        """The resources that every host has."""
        from mpctl.run.hosts.checks import common_machine
        from mpctl.run.hosts.machine import this_machine

        return this_machine() if cluster is None else common_machine(cluster.hosts)

    def _needs(self, cluster: Cluster | None) -> Needs:
        from mpctl.run.doctor.job import Needs, needs_of
        from mpctl.run.launch.preflight import chosen_device

        if self.name is None:
            return Needs()
        device = chosen_device(self.plan.job, self._machine(cluster))
        return needs_of(self.plan, device, one_host=cluster is None)

    def _refusals(self, backend: Backend, cluster: Cluster | None) -> list[Issue]:
        """Why `mpctl launch` would refuse the plan on these hosts."""
        from mpctl.records.rundir.directory import RunDir
        from mpctl.run.clusters.connect import launch_issues

        run, machine = RunDir(self.run_dir / ".mpctl-doctor"), self._machine(cluster)
        return launch_issues(self.plan, machine, backend, cluster, run=run)


def question_of(job: JobSource, run_dir: Path, *, collectives: bool) -> Question:
    """The question about a job or, where none is named, about all hosts of the backend.

    Raises InputError for a bad job, and for a backend whose hosts cannot be reached from here.
    """
    names_job = job.source is not None or any(not setting.startswith(ABOUT_HOSTS) for setting in job.overrides)
    plan = job.plan()
    backend = _backend_name(plan)
    if names_job:
        name = plan.job.name or job.source or "this job"
        return Question(plan, name, run_dir, collectives)
    for setting, value in _hosts_of(plan, backend).items():
        job = job.with_default(setting, value)
    return Question(job.plan(), None, run_dir, collectives)


def _backend_name(plan: Plan) -> str:
    from mpctl.core.errors import InputError
    from mpctl.run.clusters.registry import chosen_name

    name = chosen_name(plan.job, os.environ)
    if name in ELSEWHERE:
        message = f"the hosts of {name} cannot be asked from here"
        raise InputError.of("no-hosts", "--on", message, ELSEWHERE[name])
    return name


def _hosts_of(plan: Plan, backend: str) -> dict[str, int]:
    """Nodes, and ranks on each, of a plan for all hosts of the hostfile or the allocation."""
    from mpctl.run.clusters.slurm.allocation import find_allocation
    from mpctl.run.clusters.ssh.hostfile import read_hostfile, select_hosts

    ssh = plan.job.launch.ssh
    if backend == "ssh" and ssh.hostfile is not None:
        listed = read_hostfile(Path(ssh.hostfile)).hosts
        hosts = select_hosts(listed, ssh.include, ssh.exclude).hosts
        slots = [len(host.slots) for host in hosts if host.slots]
        return {"cluster.nodes": max(1, len(hosts)), "cluster.gpus_per_node": max(slots, default=1)}
    allocation = find_allocation(os.environ) if backend == "slurm" else None
    return {"cluster.nodes": len(allocation.nodes) if allocation else 1}
