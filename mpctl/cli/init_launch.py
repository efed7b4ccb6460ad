"""What `mpctl init` writes about the launch: the trainer that the plan is for, the scheduler, and the commands that
lead from the file to a running job."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpctl.interop.emitted import usual_launcher, usual_program
from mpctl.plan.planning.plan import Plan
from mpctl.plan.rules.launched import device_not_launched, why_not_launched
from mpctl.spec.runtime import is_launched

KUBERNETES = {
    "launch.kubernetes.image": "registry.example.com/trainer:1",
    "launch.kubernetes.claim": "runs",
    "launch.kubernetes.mount_path": "/mnt/runs",
}
"""Settings that every job on Kubernetes needs, with values to replace."""
YOURS = "yours, in place of this example"


@dataclass
class LaunchPart:
    """Settings of a job file about its launch, those that are only examples, comments, the next commands with their
    effects, and why the job cannot be launched."""

    settings: dict[str, Any] = field(default_factory=dict)
    examples: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    commands: list[tuple[str, str]] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)


def launch_part(plan: Plan, path: Path, on: str | None) -> LaunchPart:
    """The part of the job file at `path` about the launch of a plan. on: the scheduler that was named."""
    part, job, file = LaunchPart(), plan.job, shlex.quote(str(path))
    part.commands.append((f"mpctl plan {file}", "what it costs, and whether it fits"))
    if is_launched(job.training.runtime):
        part.stops = [str(check.issue) for check in why_not_launched(job)]
        part.settings["data.corpus"] = ["python-stdlib"]
        part.reasons["data.corpus"] = "text to train on: files and folders of yours; python-stdlib is on every machine"
        launch = f"mpctl launch {file}"
    else:
        part.stops = [str(check.issue) for check in [device_not_launched(job)] if check]
        launch = f"mpctl launch {file}{_add_program(part, plan)}"
        if launcher := usual_launcher(plan):
            part.commands.append((f"mpctl plan {file} --emit {launcher.name}", "the same layout for its launcher"))
    if not part.stops:
        part.commands += [(f"{launch}{more}", does) for more, does in _starts(part, path, on, job.cluster.nodes)]
    return part


def _add_program(part: LaunchPart, plan: Plan) -> str:
    """Write the trainer that the plan is for, and return the option that names it where the file only has an
    example: each user's script has its own name."""
    launcher, command = usual_launcher(plan), usual_program(plan)
    is_known = launcher is not None and bool(launcher.script)
    (part.settings if is_known else part.examples)["launch.program"] = shlex.split(command)
    part.reasons["launch.program"] = (
        "the trainer of every rank; mpctl replaces the word in braces by the plan; add data and tokenizer, and start "
        "mpctl in its folder or set program_dir"
    )
    return "" if is_known else f' --program "{command}"'


def _starts(part: LaunchPart, path: Path, on: str | None, nodes: int) -> list[tuple[str, str]]:
    """The options of `mpctl launch` that show the launch and start it, with what each does."""
    named = "" if on or nodes == 1 else " --on slurm"
    if on is not None:
        part.settings["launch.on"] = on
    if on == "kubernetes":
        image = {} if part.reasons.keys() & {"data.corpus"} else {"launch.program_dir": "/workspace"}
        part.settings |= KUBERNETES | image
        part.reasons |= {**dict.fromkeys(KUBERNETES, YOURS), "launch.program_dir": "the trainer's folder in the image"}
        named = f" --run-dir {KUBERNETES['launch.kubernetes.mount_path']}/{shlex.quote(path.stem)}"
    if on == "ssh":
        part.settings["launch.ssh.hostfile"] = "hosts"
        part.reasons["launch.ssh.hostfile"] = "a line `HOST slots=N` for each host"
    does = "train, as a batch job" if named[:5] == " --on" else "train"
    submit = " --submit" if on in ("slurm", "kubernetes") or named[:5] == " --on" else ""
    return [(f"{named}{submit} --dry-run", "show what would start"), (f"{named}{submit}", does)]
