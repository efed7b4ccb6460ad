"""`--on kubernetes --submit`: submits a run whose directory is complete to Kubeflow by kubectl.

Each pod of the job joins the run as a node (clusters/torchrun/). `--dry-run` prints the object on
any machine, without kubectl, a cluster, the volume or the data. Only the cluster knows whether the
claim, the runtime and the queue exist.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path, PurePosixPath

from mpctl.clusters.kubernetes.kubectl import LABEL, Kubectl, KubectlError
from mpctl.clusters.kubernetes.manifest import manifest_text
from mpctl.durable import write_whole
from mpctl.errors import Issue
from mpctl.hosts.checks import named_device
from mpctl.planning.plan import Plan
from mpctl.rundir.directory import RunDir
from mpctl.spec.job import JobSpec
from mpctl.spec.launch import KubernetesSpec

TABLE = "launch.kubernetes"
LONGEST_JOB_NAME = 40
LABEL_VALUE = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
SUBDOMAIN = rf"(?=[^/]{{1,253}}(/|\Z)){LABEL}(\.{LABEL})*"
"""DNS labels joined by dots, such as a volume claim's name: `runs.team-a`."""
QUALIFIED = rf"({SUBDOMAIN}/)?{LABEL_VALUE}"
"""The name of a label, a taint or a resource: `gpu`, `nvidia.com/gpu`."""
QUANTITY = r"[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E)?"
LOWER_CASE = "use lower-case letters, digits and hyphens, with a letter or digit at both ends"
JOINED = f"{LOWER_CASE}; dots may join several of them"
PREFIXED = "use NAME or PREFIX/NAME, such as nvidia.com/gpu"
FORMS = {
    "namespace": (LABEL, f"{LOWER_CASE}, at most 63 characters"),
    "claim": (SUBDOMAIN, JOINED),
    "runtime": (SUBDOMAIN, JOINED),
    "queue": (SUBDOMAIN, JOINED),
    "priority_class": (SUBDOMAIN, JOINED),
    "service_account": (SUBDOMAIN, JOINED),
    "image_pull_secret": (SUBDOMAIN, JOINED),
    "gpu_resource": (QUALIFIED, PREFIXED),
    "memory_per_node": (QUANTITY, "use a number and Mi, Gi or Ti, such as 512Gi"),
    "node_selector": (QUALIFIED, PREFIXED),
    "tolerations": (QUALIFIED, PREFIXED),
}
"""The form of each setting, or of each name in it, and how to write it."""
RESERVED_ENV = frozenset({
    "PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
    "MASTER_PORT",
})  # fmt: skip
"""Environment variables with the place of a pod in the job. Kubeflow sets them; the Trainer refuses
a TrainJob that sets those of torchrun (PET_*)."""


class KubernetesSubmitter:
    """Runs as jobs of Kubeflow in the cluster that kubectl is configured for."""

    name = "kubernetes"
    shown_anywhere = True

    def __init__(self, job: JobSpec, environment: Mapping[str, str]) -> None:
        """environment: kubectl reads it itself. The object's name ends with the current time."""
        settings = job.launch.kubernetes
        self.kubectl = Kubectl(settings.namespace, settings.context)
        self.when = time.time()

    def check(self, plan: Plan, run: RunDir, *, is_elsewhere: bool) -> list[Issue]:
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
            self.kubectl.create(self.document(plan, run), dry_run=True)
        except KubectlError as error:
            issues += error.issues
        return issues

    def document(self, plan: Plan, run: RunDir) -> str:
        return manifest_text(plan.job, run.path.resolve(), name=self._name(run))

    def submit(self, plan: Plan, run: RunDir) -> str:
        """Write RUN/kubernetes.yaml and create the object; its name."""
        document = self.document(plan, run)
        write_whole(run.manifest, document)
        self.kubectl.create(document)
        return self._name(run)

    def _name(self, run: RunDir) -> str:
        return job_name(run.path.resolve().name, self.when)


def job_name(run_name: str, when: float) -> str:
    """The name of the object for a run that is submitted at `when`, in seconds since 1970.

    It becomes part of the names of pods, NAME-worker-0-abcde, which are DNS labels of at most 63
    characters that begin with a letter (RFC 1035). It ends with the time (UTC), since an object
    that has ended keeps its name until it is deleted.

    >>> job_name("Llama 3 (tuned)", 1792713065.0)
    'llama-3-tuned-1022-235105'
    """
    stamp = time.strftime("%m%d-%H%M%S", time.gmtime(when))
    words = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
    if not words[:1].isalpha():
        words = f"run-{words}"
    kept = words[: LONGEST_JOB_NAME - len(stamp) - 1].strip("-")
    return f"{kept}-{stamp}"


# ---------------------------------------------------------------- settings


def submission_issues(job: JobSpec, run_path: Path, *, is_mounted: bool = True) -> list[Issue]:
    """Every reason why the job's settings cannot be submitted; empty when they can. is_mounted:
    whether this machine must see the volume."""
    settings = job.launch.kubernetes
    checks = (
        _required(settings),
        _device(job),
        form_issues(settings),
        env_issues(settings.env),
        _paths(job, run_path, is_mounted=is_mounted),
    )
    return list(chain.from_iterable(checks))


def _required(settings: KubernetesSpec) -> Iterator[Issue]:
    """Settings without a default that a job of Kubernetes needs."""
    needed = {
        "image": ("no image is named", "an image with Python, torch and this mpctl"),
        "claim": (
            "no volume claim is named, so the pods would not see the run directory",
            "a PersistentVolumeClaim with access mode ReadWriteMany",
        ),
        "mount_path": (
            "it is not said where the claim is mounted",
            "the absolute path at which this machine and the pods see its files",
        ),
    }
    for key, (message, hint) in needed.items():
        if getattr(settings, key) is None:
            yield Issue("missing", f"{TABLE}.{key}", message, f"give {hint}")


def _device(job: JobSpec) -> Iterator[Issue]:
    if named_device(job) is None:
        message = "auto, and the job names no cluster whose device is known: pods get GPUs only "
        yield Issue("device-unknown", "launch.device", f"{message}where they are asked for",
                    "say --device cuda or --device cpu")  # fmt: skip


def form_issues(settings: KubernetesSpec) -> Iterator[Issue]:
    """Settings whose values do not have the required form."""
    for key, (form, hint) in FORMS.items():
        value = getattr(settings, key)
        for name in [value] if isinstance(value, str) else value or ():
            if not re.fullmatch(form, name):
                is_amount = key == "memory_per_node"
                what = "an amount of memory" if is_amount else "a name in Kubernetes"
                rule = "bad-value" if is_amount else "bad-name"
                yield Issue(rule, f"{TABLE}.{key}", f"{name!r} is not {what}", hint)
    for name, value in settings.node_selector.items():
        if value and not re.fullmatch(LABEL_VALUE, value):
            message = f"{value!r} cannot be the value of the label {name}"
            yield Issue("bad-value", f"{TABLE}.node_selector", message,
                        "use at most 63 letters, digits, '-', '_' and '.'")  # fmt: skip


def _paths(job: JobSpec, run_path: Path, *, is_mounted: bool) -> Iterator[Issue]:
    """The run and all that its ranks read must be on the claim, at the path in the pods."""
    mount = job.launch.kubernetes.mount_path
    if mount is None:
        return
    where = f"{TABLE}.mount_path"
    if not PurePosixPath(mount).is_absolute() or ":" in mount:
        yield Issue("bad-path", where, f"{mount!r} is not an absolute path without colons",
                    "use a path such as /mnt/runs")  # fmt: skip
        return
    if is_mounted and not Path(mount).is_dir():
        yield Issue(
            "not-mounted",
            where,
            f"{mount} is not a folder of this machine, which must see the run directory at the "
            "path that the pods see",
            "mount the volume there, or submit from a pod that mounts the claim",
        )
        return
    paths = {"--run-dir": str(run_path), **_read_by_ranks(job)}
    for setting, path in paths.items():
        if not Path(path).resolve().is_relative_to(Path(mount).resolve()):
            message = f"{path} is not below {mount}, the only folder that the pods share"
            yield Issue("not-on-claim", setting, message, f"move it to a folder below {mount}")


def _read_by_ranks(job: JobSpec) -> dict[str, str]:
    """The paths outside of the run directory that the ranks open, by setting. A corpus is prepared
    into the run directory before the submission."""
    data, initial = job.data, job.training.init_from
    paths = {
        "data.path": data.path,
        "training.init_from": initial,
        "data.tokenizer": data.tokenizer if initial is not None else None,
        **{f"data.validation.{name}": path for name, path in data.validation.items()},
    }
    return {setting: path for setting, path in paths.items() if path is not None}


def claim_issues(claim: object, job: JobSpec) -> Iterator[Issue]:
    """What is wrong with the volume claim. claim: its document; None where there is none."""
    settings, where = job.launch.kubernetes, f"{TABLE}.claim"
    if claim is None:
        yield Issue("no-claim", where, f"there is no PersistentVolumeClaim {settings.claim!r} in "
                    f"namespace {settings.namespace or 'of kubectl'}",
                    "create it, or name one of `kubectl get pvc`")  # fmt: skip
        return
    spec = claim.get("spec") if isinstance(claim, dict) else None
    modes = spec.get("accessModes") if isinstance(spec, dict) else None
    if job.cluster.nodes > 1 and isinstance(modes, list) and "ReadWriteMany" not in modes:
        message = f"{settings.claim!r} has access modes {', '.join(map(str, modes))}, and the pods "
        yield Issue("claim-not-shared", where, f"{message}of {job.cluster.nodes} nodes write there",
                    "use a claim with access mode ReadWriteMany")  # fmt: skip


def env_issues(names: Iterable[str]) -> Iterator[Issue]:
    where = "launch.kubernetes.env"
    for name in names:
        if name in RESERVED_ENV:
            yield Issue("reserved-variable", where, f"{name} is set by Kubeflow for each pod",
                        "leave it out")  # fmt: skip
        elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield Issue("bad-name", where, f"{name!r} is not the name of an environment variable",
                        "use letters, digits and underscores, and no digit first")  # fmt: skip
