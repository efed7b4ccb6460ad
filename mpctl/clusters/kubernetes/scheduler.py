"""Jobs of Kubeflow, as `mpctl status` and `mpctl stop` see them."""

from __future__ import annotations

import re

from mpctl.clusters.backend import ScheduledJob, require_form
from mpctl.clusters.kubernetes.jobs import job_state, pod_selector, resource
from mpctl.clusters.kubernetes.kubectl import Kubectl
from mpctl.spec.job import JobSpec

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""RFC 1123's label: jobs that mpctl creates and namespaces have such names."""


class KubernetesScheduler:
    """Asks kubectl, in the namespace that the job was submitted to. A job's id is the name of its
    object, of the kind TrainJob or PyTorchJob."""

    def __init__(self, job: JobSpec) -> None:
        settings = job.launch.kubernetes
        self.kind = settings.kind
        if settings.namespace is not None:
            where = "job.json: launch.kubernetes.namespace"
            require_form(settings.namespace, LABEL, "the name of a namespace", where)
        self.kubectl = Kubectl(settings.namespace, settings.context)

    def find(self, job_id: str) -> ScheduledJob | None:
        """The job and its pods; None when there is no object of that name."""
        document = self.kubectl.find(resource(self.kind), _require(job_id))
        if document is None:
            return None
        pods = self.kubectl.get("pods", f"--selector={pod_selector(self.kind, job_id)}")
        state = job_state(document, pods)
        text = f"{state.phase} ({state.reason})" if state.reason else state.phase
        is_active = state.phase not in ("succeeded", "failed")
        return ScheduledJob(text, is_active, state.phase not in ("suspended", "pending"))

    def cancel(self, job_id: str) -> None:
        """Delete the object, and with it its pods."""
        self.kubectl.delete(resource(self.kind), _require(job_id))


def _require(job_id: str) -> str:
    return require_form(job_id, LABEL, "the name of an object", "launcher.json: job_id")
