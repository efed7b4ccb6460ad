"""What `mpctl launch` prints besides the progress of a run: its commands, its submission."""

from __future__ import annotations

from collections.abc import Sequence

from mpctl.launch.launch_plan import HostCommand, LaunchPlan
from mpctl.render.console import say
from mpctl.render.json import print_json
from mpctl.rundir.directory import RunDir


def print_commands(plan: LaunchPlan, commands: Sequence[HostCommand], *, as_json: bool) -> None:
    """Print the commands of a launch, those of each host under its name where there are several."""
    if as_json:
        print_json(plan.document(commands))
        return
    files = ", ".join(plan.files)
    say(f"# writes {files} and the records of the run into {plan.run.path}/")
    for host in commands:
        if len(commands) > 1:
            say(f"# node {host.node}, {host.host}:")
        say(host.text)


def print_submission(scheduler: str, job_id: str, run: RunDir, *, as_json: bool) -> None:
    """Say what was submitted and how to follow it."""
    if as_json:
        print_json({"schema": "mpctl.submission/1", "scheduler": scheduler, "job_id": job_id,
                    "run_dir": str(run.path)})  # fmt: skip
        return
    say(f"submitted to {scheduler} as job {job_id}; its run is {run.path}")
    for command in ("status", "logs --follow", "stop"):
        say(f"  mpctl {command} {run.path}")
