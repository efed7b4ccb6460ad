"""`mpctl doctor`: what every host offers, and what would break a launch there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpctl.cli.options import JobSource, with_job

if TYPE_CHECKING:
    from mpctl.doctor.backend_hosts import ConnectedHosts
    from mpctl.doctor.diagnosis import Diagnosis
    from mpctl.doctor.examine import Progress
    from mpctl.doctor.needs import Needs
    from mpctl.errors import Issue
    from mpctl.launch.cluster import Cluster
    from mpctl.launch.node.machine import Machine
    from mpctl.planning.plan import Plan

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)

RunDirOption = Annotated[
    Path,
    typer.Option(help="Directory of the runs: whether ranks can write there, and how fast."),
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(help="Where ranks would run; by default as the job says.", show_default=False),
]
OnOption = Annotated[
    Literal["auto", "local", "slurm", "ssh", "kubernetes", "torchrun"] | None,
    typer.Option(
        help="Which hosts: this one, those of the Slurm allocation or of a hostfile.",
        show_default=False,
    ),
]
HostfileOption = Annotated[
    str | None,
    typer.Option(
        help="With --on ssh: a file with a line `HOST slots=N` for each host.", show_default=False
    ),
]
CollectivesOption = Annotated[
    bool,
    typer.Option("--collectives", help="Also time all-reduces of torch, by gloo or NCCL."),
]
RedactOption = Annotated[
    bool,
    typer.Option("--redact", help="Replace names of hosts and users, addresses, home folders."),
]
MarkdownOption = Annotated[
    bool, typer.Option("--markdown", help="Print Markdown to paste into a bug report.")
]
AsJsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@app.command()
@with_job
def doctor(
    job: JobSource,
    run_dir: RunDirOption = Path("runs"),
    device: DeviceOption = None,
    on: OnOption = None,
    hostfile: HostfileOption = None,
    collectives: CollectivesOption = False,
    redact: RedactOption = False,
    markdown: MarkdownOption = False,
    as_json: AsJsonOption = False,
) -> None:
    """Look at every host: software, devices, memory, limits, network, run directory, speed of
    links.

    With JOB also whether its launch would start. Exit code 1 when something would break a launch;
    every finding comes with a way out. Nothing is left behind on any host.
    """
    from mpctl.doctor.redact import redact as redacted

    _require_hosts(on)
    settings = {"launch.on": on, "launch.device": device, "launch.ssh.hostfile": hostfile}
    diagnosis = _question(job.with_settings(settings), run_dir, collectives).answer()
    shown = redacted(diagnosis) if redact else diagnosis
    if as_json:
        from mpctl.render.json import print_json

        print_json(shown.model_dump(by_alias=True))
    elif markdown:
        from mpctl.render.doctor_markdown import print_markdown

        print_markdown(shown)
    else:
        from mpctl.render.doctor import print_diagnosis

        print_diagnosis(shown)
    raise typer.Exit(1 if diagnosis.has_errors else 0)


@dataclass(frozen=True)
class Question:
    """What is asked of the hosts. plan: of the job, or of its hosts alone where no job is named;
    name: of the job, None without one."""

    plan: Plan
    name: str | None
    run_dir: Path
    collectives: bool

    def answer(self) -> Diagnosis:
        """Connect to the hosts and look at them, with a bar. Hosts that cannot be used are findings
        of their own: then nothing else is known."""
        import os

        from mpctl.doctor.backend_hosts import connected_hosts
        from mpctl.doctor.diagnosis import of_issues
        from mpctl.errors import InputError
        from mpctl.launch.backends.registry import find_backend
        from mpctl.render.tasks import TaskBar

        backend = find_backend(self.plan.job, os.environ)
        with TaskBar() as bar:
            bar.update("connecting", 0, 0)
            try:
                with connected_hosts(backend, self.plan, self.run_dir, bar.print) as connected:
                    return self._examined(backend.name, connected, bar.update)
            except InputError as error:
                return of_issues(error.issues, backend=backend.name, job=self.name)

    def _examined(
        self, backend: str, connected: ConnectedHosts, on_progress: Progress
    ) -> Diagnosis:
        """Look at the hosts, and add what a launch of the job would be refused for."""
        from mpctl.doctor.diagnosis import with_issues
        from mpctl.doctor.examine import Examination, examine

        cluster = connected.cluster
        wanted = Examination(
            backend, self.run_dir, self._needs(cluster), self.name, self.collectives
        )
        diagnosis = examine(connected.hosts, wanted, on_progress)
        return diagnosis if self.name is None else with_issues(diagnosis, self._refusals(cluster))

    def _machine(self, cluster: Cluster | None) -> Machine:
        """The least that every host has."""
        from mpctl.launch.control.host_checks import common_machine
        from mpctl.launch.node.machine import this_machine

        return this_machine() if cluster is None else common_machine(cluster.hosts)

    def _needs(self, cluster: Cluster | None) -> Needs:
        from mpctl.doctor.needs import Needs, needs_of
        from mpctl.launch.preflight import chosen_device

        if self.name is None:
            return Needs()
        device = chosen_device(self.plan.job, self._machine(cluster))
        return needs_of(self.plan, device, one_host=cluster is None)

    def _refusals(self, cluster: Cluster | None) -> list[Issue]:
        """Why `mpctl launch` would refuse the plan on these hosts."""
        from mpctl.launch.preflight import check_launch
        from mpctl.rundir.directory import RunDir

        run, machine = RunDir(self.run_dir / "doctor"), self._machine(cluster)
        return check_launch(
            self.plan, machine, run, host_check=None if cluster is None else cluster.check
        )


def _question(job: JobSource, run_dir: Path, collectives: bool) -> Question:
    """The plan of the job; where no job is named, one of as many hosts as the backend has."""
    named = job.source is not None or any(
        not key.startswith(("launch.", "cluster.nodes")) for key in job.overrides
    )
    if named:
        plan = job.plan()
        return Question(plan, plan.job.name or job.source or "this job", run_dir, collectives)
    plan = job.with_default("cluster.nodes", _number_of_hosts(job)).plan()
    return Question(plan, None, run_dir, collectives)


def _number_of_hosts(job: JobSource) -> int:
    """The hosts of the hostfile or of the surrounding allocation; 1 without either."""
    import os

    from mpctl.launch.node.machine import hosts_in
    from mpctl.launch.ssh.hostfile import read_hostfile

    hostfile = job.overrides.get("launch.ssh.hostfile")
    if hostfile is None:
        return hosts_in(os.environ) if job.overrides.get("launch.on") != "local" else 1
    return max(1, len(read_hostfile(Path(str(hostfile))).hosts))


def _require_hosts(on: str | None) -> None:
    """Raises InputError for backends whose hosts cannot be reached from here."""
    from mpctl.errors import InputError

    ways = {
        "kubernetes": "run it in the pods: kubectl exec POD -- mpctl doctor",
        "torchrun": "run `mpctl doctor` without --on in each of its processes",
    }
    if on in ways:
        raise InputError.of("no-hosts", "--on", f"{on} has no hosts that can be asked", ways[on])
