"""Pods that Kubernetes starts again although their launch has ended.

The pods of a TrainJob are restarted as its runtime says, by default six times, and nothing in the
TrainJob can change that. A pod that ended with its run must not start the run again:

    failed                 `launch.max_restarts` says how often a run is tried, and it was;
                           not where no rank was started: another try may find the other pods
    stopped by a request   `mpctl stop` was asked for
    stopped by a signal    the pod was moved or made room for others: the run goes on

A pod knows the submission that it belongs to by its name (MPCTL_JOB), so that a run that is
submitted anew is started in any case.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mpctl.clusters.kubernetes.manifest import JOB_VARIABLE
from mpctl.rundir.directory import RunDir

AGAIN = "submit it again with mpctl launch --resume --on kubernetes --submit"


def ended_launch(run: RunDir, environment: Mapping[str, str]) -> str | None:
    """Why the launch of this pod is over, in words; None where it is not, or in no pod."""
    job = environment.get(JOB_VARIABLE)
    if job is None or _read(run.launcher).get("job_id") != job:
        return None
    summary = _read(run.summary)
    status = summary.get("status")
    if status == "failed" and summary.get("attempts") != 0:
        return f"{job} has failed, see {run.summary}, and Kubernetes started its pod again; {AGAIN}"
    is_requested = run.stop_request.exists() and not _read(run.stop_request).get("relayed")
    if status == "stopped" and is_requested:
        return f"{job} was stopped on request, and Kubernetes started its pod again; {AGAIN}"
    return None


def _read(path: Path) -> dict[str, object]:
    """A JSON document of the run directory; empty where there is none."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
