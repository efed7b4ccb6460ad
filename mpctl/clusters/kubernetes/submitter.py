"""`--on kubernetes --submit`: a run whose directory is complete is handed to Kubeflow by kubectl.

Each pod of the job joins the run as a node (clusters/torchrun.py). What the object looks like is in
manifest.py; `--dry-run` prints it on any machine, without kubectl, a cluster, the volume or the
data.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from mpctl.clusters.kubernetes.submission import claim_issues, submission_issues
from mpctl.clusters.kubernetes.kubectl import Kubectl, KubectlError
from mpctl.clusters.kubernetes.manifest import PodJob, manifest, manifest_text, pod_job
from mpctl.clusters.kubernetes.submission import job_name
from mpctl.durable import write_whole
from mpctl.errors import Issue
from mpctl.planning.plan import Plan
from mpctl.rundir.directory import RunDir
from mpctl.spec.job import JobSpec


class KubernetesSubmitter:
    """Runs as jobs of Kubeflow in the cluster that kubectl is configured for."""

    name = "kubernetes"
    shown_anywhere = True

    def __init__(self, job: JobSpec, environment: Mapping[str, str]) -> None:
        """kubectl has its own environment; the object's name ends with the time of this moment."""
        settings = job.launch.kubernetes
        self.kubectl = Kubectl(settings.namespace, settings.context)
        self.when = time.time()

    def check(self, plan: Plan, run: RunDir, *, is_elsewhere: bool) -> list[Issue]:
        """What is missing or wrong in the settings, found without a cluster."""
        return submission_issues(plan.job, run.path, is_mounted=not is_elsewhere)

    def dry_run(self, plan: Plan, run: RunDir) -> list[Issue]:
        """Why the cluster would refuse the object: it is asked to check it without creating it."""
        settings = plan.job.launch.kubernetes
        try:
            claims = self.kubectl.find("persistentvolumeclaims", settings.claim or "")
            issues = list(claim_issues(claims, plan.job))
        except KubectlError as error:
            if error.rule != "forbidden":  # to read claims needs more rights than to use them
                return list(error.issues)
            issues = []
        try:
            self.kubectl.create(self.document(plan, run), rehearse=True)
        except KubectlError as error:
            issues += error.issues
        return issues

    def document(self, plan: Plan, run: RunDir) -> str:
        """The object as YAML."""
        return manifest_text(manifest(self._pod_job(plan, run)))

    def submit(self, plan: Plan, run: RunDir) -> str:
        """Write RUN/kubernetes.yaml and create the object; its name."""
        document = self.document(plan, run)
        write_whole(run.manifest, document)
        self.kubectl.create(document)
        return self._pod_job(plan, run).name

    def _pod_job(self, plan: Plan, run: RunDir) -> PodJob:
        path = run.path.resolve()
        return pod_job(plan.job, path, name=job_name(path.name, self.when))
