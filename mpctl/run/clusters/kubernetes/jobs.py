"""Submitted jobs, as `mpctl status` and `mpctl stop` see them, and as their pods do.

A cluster's answer is untrusted input: values that are missing or of another type count as absent
and never raise.

    TrainJob    conditions Suspended, Complete, Failed; none of them true while its pods are waited
                for or run. Its pods have the label jobset.sigs.k8s.io/jobset-name=NAME.
    PyTorchJob  conditions Created, Running, Restarting, Suspended, Succeeded, Failed. Its pods have
                the label training.kubeflow.org/job-name=NAME.
    JobSet      conditions Suspended, Completed, Failed, and pods with the label of a TrainJob's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.launcher import is_stop_asked_for, read_table
from mpctl.run.clusters.backend import ScheduledJob, require_form
from mpctl.run.clusters.kubernetes.kubectl import LABEL, Kubectl
from mpctl.run.clusters.kubernetes.manifest import API_VERSIONS, JOB_VARIABLE, POD_LABELS
from mpctl.spec.job import JobSpec

RESOURCES = {"TrainJob": "trainjobs", "PyTorchJob": "pytorchjobs", "JobSet": "jobsets"}
PHASES = {
    "Failed": "failed",
    "Complete": "succeeded",
    "Completed": "succeeded",
    "Succeeded": "succeeded",
    "Suspended": "suspended",
    "Running": "running",
}
"""The meaning of each condition that is true, the most decisive first."""
NAME = re.compile(LABEL)
"""Jobs that mpctl creates and namespaces have such names."""
AGAIN = "submit it again with mpctl launch --resume --on kubernetes --submit"


class KubernetesScheduler:
    """Calls kubectl in the namespace that the job was submitted to. A job's id is the name of its
    object, of the kind TrainJob, PyTorchJob or JobSet."""

    def __init__(self, job: JobSpec) -> None:
        settings = job.launch.kubernetes
        self.kind = settings.kind
        if settings.namespace is not None:
            where = "job.json: launch.kubernetes.namespace"
            require_form(settings.namespace, NAME, "the name of a namespace", where)
        self.kubectl = Kubectl(settings.namespace, settings.context)

    def find(self, job_id: str) -> ScheduledJob | None:
        document = self.kubectl.find(resource(self.kind), _require(job_id))
        if document is None:
            return None
        return read_job(document, self.kubectl.get("pods", f"--selector={POD_LABELS[self.kind]}={job_id}"))

    def cancel(self, job_id: str) -> None:
        """Delete the object, and with it its pods."""
        self.kubectl.delete(resource(self.kind), _require(job_id))


def resource(kind: str) -> str:
    """The unambiguous name of a kind for kubectl: `trainjobs.trainer.kubeflow.org`."""
    return f"{RESOURCES[kind]}.{API_VERSIONS[kind].partition('/')[0]}"


def read_job(job: object, pods: object) -> ScheduledJob:
    """A job from its document and the list of its pods: `failed (BackoffLimitExceeded: ...)`,
    `pending (Unschedulable: 0/3 nodes are available)`."""
    phase, reason = _phase(job, _items(pods, "items"))
    return ScheduledJob(
        f"{phase} ({reason})" if reason else phase,
        is_active=phase not in ("succeeded", "failed"),
        has_begun=phase not in ("suspended", "pending"),
    )


def _phase(job: object, pods: Sequence[dict[str, object]]) -> tuple[str, str]:
    true = {
        _text(condition, "type"): condition for condition in _conditions(job) if _text(condition, "status") == "True"
    }
    for kind, phase in PHASES.items():
        if kind in true:
            words = (_text(true[kind], "reason"), _text(true[kind], "message"))
            return phase, ": ".join(word for word in words if word)
    if any(_text(_table(pod, "status"), "phase") == "Running" for pod in pods):
        return "running", ""
    return "pending", next((problem for pod in pods if (problem := _problem(pod))), "")


def _problem(pod: object) -> str:
    """Return why a pod does not run: it is not scheduled, or its container waits or has failed."""
    for container in _items(pod, "status", "containerStatuses"):
        for state in ("waiting", "terminated"):
            table = _table(container, "state", state)
            reason, message = _text(table, "reason"), _text(table, "message")
            if reason and reason != "Completed":
                return f"{reason}: {message}" if message else reason
    for condition in _conditions(pod):
        if _text(condition, "type") == "PodScheduled" and _text(condition, "status") == "False":
            return f"{_text(condition, 'reason')}: {_text(condition, 'message')}"
    return ""


def _conditions(document: object) -> Sequence[dict[str, object]]:
    return _items(document, "status", "conditions")


def _items(document: object, *path: str) -> Sequence[dict[str, object]]:
    """Return the tables of the list at a path; empty if there is no list."""
    *tables, last = path
    items = _table(document, *tables).get(last)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _table(document: object, *path: str) -> dict[str, object]:
    """Return the table at a path; empty if there is none."""
    for key in path:
        document = document.get(key) if isinstance(document, dict) else None
    return document if isinstance(document, dict) else {}


def _text(table: dict[str, object], key: str) -> str:
    value = table.get(key)
    return value if isinstance(value, str) else ""


def _require(job_id: str) -> str:
    return require_form(job_id, NAME, "the name of an object", "launcher.json: job_id")


# ---------------------------------------------------------------- restarted pods


def ended_launch(run: RunDir, environment: Mapping[str, str]) -> str | None:
    """Describe why the launch of this pod is over; None if it is not, or outside of a pod.

    The pods of a TrainJob are restarted as its runtime sets, by default six times, and nothing in
    the TrainJob can change that; those of the other kinds are replaced where a signal ended them. A
    pod that ended with its run must not start the run again:

        failed                 `launch.max_restarts` has limited its attempts already; but
                               not if no rank was started: another try may find the other pods
        stopped by a request   `mpctl stop` was asked for
        stopped by a signal    the pod was moved or preempted: the run continues

    A pod knows the submission that it belongs to by its name (MPCTL_JOB), so that a run that is
    submitted again is always started.
    """
    job = environment.get(JOB_VARIABLE)
    if job is None or read_table(run.launcher).get("job_id") != job:
        return None
    summary = read_table(run.summary)
    status = summary.get("status")
    if status == "failed" and summary.get("attempts") != 0:
        return f"{job} has failed, see {run.summary}, and Kubernetes started its pod again; {AGAIN}"
    if status == "stopped" and is_stop_asked_for(run.stop_request):
        return f"{job} was stopped on request, and Kubernetes started its pod again; {AGAIN}"
    return None
