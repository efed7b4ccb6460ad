"""`--on kubernetes --submit`: submits a run whose directory is complete by kubectl.

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

from mpctl.core.durable import write_whole
from mpctl.core.errors import Issue
from mpctl.plan.planning.plan import Plan
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.program import script_words
from mpctl.run.clusters.backend import paths_read
from mpctl.run.clusters.kubernetes.kubectl import LABEL, Kubectl, KubectlError
from mpctl.run.clusters.kubernetes.manifest import CONTAINERS, manifest_text
from mpctl.run.hosts.checks import named_device
from mpctl.spec.job import JobSpec
from mpctl.spec.launch import KubernetesSpec, TolerationSpec

TABLE = "launch.kubernetes"
LONGEST_JOB_NAME = 40
LABEL_VALUE = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
SUBDOMAIN = rf"(?=[^/]{{1,253}}(/|\Z)){LABEL}(\.{LABEL})*"
"""DNS labels joined by dots, such as a volume claim's name: `runs.team-a`."""
QUALIFIED = rf"({SUBDOMAIN}/)?{LABEL_VALUE}"
"""The name of a label, a taint or a resource: `gpu`, `nvidia.com/gpu`."""
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
QUANTITY = r"[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E)?"
LOWER_CASE = "use lower-case letters, digits and hyphens, with a letter or digit at both ends"
JOINED = f"{LOWER_CASE}; dots may join several of them"
PREFIXED = "use NAME or PREFIX/NAME, such as nvidia.com/gpu"
AMOUNT = "use a number and Mi, Gi or Ti, such as 512Gi"
LABEL_HINT = "use at most 63 letters, digits, '-', '_' and '.'"
FORMS = {
    "namespace": (LABEL, f"{LOWER_CASE}, at most 63 characters"),
    "claim": (SUBDOMAIN, JOINED),
    "runtime": (SUBDOMAIN, JOINED),
    "queue": (SUBDOMAIN, JOINED),
    "priority_class": (SUBDOMAIN, JOINED),
    "service_account": (SUBDOMAIN, JOINED),
    "image_pull_secret": (SUBDOMAIN, JOINED),
    "gpu_resource": (QUALIFIED, PREFIXED),
    "memory_per_node": (QUANTITY, AMOUNT),
    "shared_memory": (QUANTITY, AMOUNT),
    "resources": (QUALIFIED, PREFIXED),
    "node_selector": (QUALIFIED, PREFIXED),
    "same_topology": (QUALIFIED, PREFIXED),
    "labels": (QUALIFIED, PREFIXED),
    "annotations": (QUALIFIED, PREFIXED),
    "tolerations": (QUALIFIED, PREFIXED),
    "secret_env": (VARIABLE, "use letters, digits and underscores, and no digit first"),
    "env_from": (rf"(secret|configmap)/{SUBDOMAIN}", "use secret/NAME or configmap/NAME"),
}
"""The form of each setting, or of each name in it, and how to write it."""
VALUES = {
    "node_selector": (rf"({LABEL_VALUE})?", LABEL_HINT),
    "labels": (rf"({LABEL_VALUE})?", LABEL_HINT),
    "resources": (QUANTITY, "use a number, such as 8, or one with Mi, Gi or Ti"),
    "secret_env": (rf"{SUBDOMAIN}/[-._A-Za-z0-9]{{1,253}}", "use SECRET/KEY, such as hub/token"),
}
"""The form of the values of settings by name, and how to write them."""
RESERVED_LABELS = ("app.kubernetes.io/managed-by", "kueue.x-k8s.io/", "mpctl/")
SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|ACCESS_KEY|SECRET_KEY|PRIVATE_KEY)$", re.IGNORECASE
)
"""Names of environment variables that hold secrets."""
NOT_IN_TRAIN_JOB = {
    "host_network": "set hostNetwork in the runtime",
    "env_from": "name each variable in secret_env",
    "ttl_seconds": "set ttlSecondsAfterFinished in the runtime",
}
"""Settings that a TrainJob has no field for, and what to do instead."""
RESERVED_ENV = frozenset(
    {
        "PET_NNODES",
        "PET_NPROC_PER_NODE",
        "PET_NODE_RANK",
        "PET_MASTER_ADDR",
        "PET_MASTER_PORT",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
"""Environment variables with the place of a pod in the job. Kubeflow sets them; the Trainer refuses
a TrainJob that sets those of torchrun (PET_*)."""


class KubernetesSubmitter:
    """Runs as jobs of Kubeflow, or as JobSets, in the cluster that kubectl is configured for."""

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
        """Return the cluster's reasons to refuse the object, which it checks without creating it."""
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

    def notes(self, plan: Plan, run: RunDir) -> list[str]:
        """None: kubectl changes nothing of the object."""
        return []

    def document(self, plan: Plan, run: RunDir) -> str:
        return manifest_text(plan, run.path.resolve(), name=self._name(run))

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
        env_issues(settings.secret_env, "secret_env"),
        policy_issues(settings),
        patch_issues(settings.pod_patch),
        _volume_paths(settings),
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
        yield Issue(
            "device-unknown", "launch.device", f"{message}where they are asked for", "say --device cuda or --device cpu"
        )


def form_issues(settings: KubernetesSpec) -> Iterator[Issue]:
    """Yield the issues of settings without the required form."""
    for key, (form, hint) in FORMS.items():
        value = getattr(settings, key)
        for name in [value] if isinstance(value, str) else value or ():
            text = name.key if isinstance(name, TolerationSpec) else name
            if text is not None and not re.fullmatch(form, text):
                is_amount = form == QUANTITY
                what = "an amount of memory" if is_amount else "a name in Kubernetes"
                rule = "bad-value" if is_amount else "bad-name"
                yield Issue(rule, f"{TABLE}.{key}", f"{text!r} is not {what}", hint)
    for key, (form, hint) in VALUES.items():
        for name, value in getattr(settings, key).items():
            if not re.fullmatch(form, value):
                message = f"{value!r} cannot be the value of {name}"
                yield Issue("bad-value", f"{TABLE}.{key}", message, hint)
    for key in ("labels", "annotations"):
        for name in getattr(settings, key):
            if name.startswith(RESERVED_LABELS):
                message = f"{name} is set by mpctl"
                yield Issue(
                    "reserved-label",
                    f"{TABLE}.{key}",
                    message,
                    "leave it out, or use launch.kubernetes.queue and priority_class",
                )


def policy_issues(settings: KubernetesSpec) -> Iterator[Issue]:
    """Settings that exclude each other, or that the kind of the object has no field for."""
    for name, key in (
        (settings.gpu_resource, "cluster.gpus_per_node"),
        ("cpu", f"{TABLE}.cpus_per_node"),
        ("memory", f"{TABLE}.memory_per_node"),
    ):
        if name in settings.resources:
            message = f"{name!r} follows from {key}"
            yield Issue("bad-value", f"{TABLE}.resources", message, f"set {key} in its place")
    if settings.restricted:
        where = f"{TABLE}.restricted"
        for key in ("host_network", "ipc_lock"):
            if getattr(settings, key):
                message = f"the policy `restricted` admits no pod with {key}"
                yield Issue(
                    "not-restricted",
                    where,
                    message,
                    f"leave one of restricted and {key} out, or ask for a namespace with a wider policy",
                )
        if settings.run_as_user == 0:
            yield Issue(
                "not-restricted",
                where,
                "run_as_user is 0, which is root, and the policy `restricted` admits no root",
                "use the id of another user",
            )
    if settings.kind == "TrainJob":
        for key, way_out in NOT_IN_TRAIN_JOB.items():
            if getattr(settings, key) not in (None, False, []):
                message = f"a TrainJob has no field for {key}"
                yield Issue("no-such-field", f"{TABLE}.{key}", message, f'{way_out}, or use kind = "JobSet"')


def patch_issues(patch: object) -> Iterator[Issue]:
    """Yield the issues of `pod_patch`."""
    where = f"{TABLE}.pod_patch"
    tables = patch if isinstance(patch, dict) else {}
    for key in tables.keys() - {"metadata", "spec"}:
        yield Issue(
            "bad-patch",
            where,
            f"{key!r} is no part of a pod's template",
            "give the tables metadata and spec, as in the template of a Job",
        )
    spec = tables.get("spec", {})
    if isinstance(spec, dict) and "restartPolicy" in spec:
        yield Issue(
            "bad-patch",
            where,
            "spec.restartPolicy follows from the kind of the object",
            "leave it out; for a TrainJob, set it in the runtime",
        )
    containers = spec.get("containers", []) if isinstance(spec, dict) else None
    if not isinstance(containers, list) or not all(
        isinstance(item, dict) and isinstance(item.get("name"), str) for item in containers
    ):
        names = " or ".join(sorted(set(CONTAINERS.values())))
        yield Issue(
            "bad-patch",
            where,
            "spec.containers must be a list of tables with names",
            f"the one that mpctl runs in is named {names}",
        )
    elif any(item["name"] in CONTAINERS.values() and {"command", "args"} & item.keys() for item in containers):
        yield Issue("bad-patch", where, "the command of the container is mpctl's", "leave command and args out")


def _paths(job: JobSpec, run_path: Path, *, is_mounted: bool) -> Iterator[Issue]:
    """The run and all that its ranks read must be on the claim, at the path in the pods."""
    mount = job.launch.kubernetes.mount_path
    if mount is None:
        return
    where = f"{TABLE}.mount_path"
    if not PurePosixPath(mount).is_absolute() or ":" in mount:
        yield Issue(
            "bad-path", where, f"{mount!r} is not an absolute path without colons", "use a path such as /mnt/runs"
        )
        return
    if is_mounted and not Path(mount).is_dir():
        yield Issue(
            "not-mounted",
            where,
            f"{mount} is not a folder of this machine, which must see the run directory at the path that the pods see",
            "mount the volume there, or submit from a pod that mounts the claim",
        )
        return
    mounts = [mount, *(volume.mount_path for volume in job.launch.kubernetes.volumes)]
    for setting, path in {"--run-dir": str(run_path), **paths_read(job)}.items():
        seen = mounts[:1] if setting == "--run-dir" else mounts
        if any(Path(path).resolve().is_relative_to(Path(one).resolve()) for one in seen):
            continue
        hint = f"move it to a folder below {mount}"
        if setting == "launch.program_dir":
            if _is_in_image(job):
                continue
            hint += ", or for a program in the image set launch.program_dir to its folder there, such as /workspace"
        message = f"{path} is not below {' or '.join(seen)}, which the pods share"
        yield Issue("not-on-claim", setting, message, hint)


def _is_in_image(job: JobSpec) -> bool:
    """Whether a program's directory can only be one of the image: an absolute path, at which this machine has no
    folder or not the program's script. If it has both, it is more likely a folder that the pods do not see."""
    folder, words = job.launch.program_dir, script_words(job.launch.program)
    if folder is None or not Path(folder).is_absolute():
        return False
    script = None if words is None or words[0] == "-m" else words[0]
    return not Path(folder).exists() or (script is not None and not Path(folder, script).exists())


def _volume_paths(settings: KubernetesSpec) -> Iterator[Issue]:
    """Further volumes must have paths of their own."""
    where = f"{TABLE}.volumes"
    taken = [settings.mount_path, "/dev/shm"]
    for volume in settings.volumes:
        path = volume.mount_path
        if not PurePosixPath(path).is_absolute() or ":" in path:
            yield Issue(
                "bad-path", where, f"{path!r} is not an absolute path without colons", "use a path such as /mnt/data"
            )
        elif path in taken:
            yield Issue("bad-path", where, f"{path} is mounted twice", "use a path for each")
        if not re.fullmatch(SUBDOMAIN, volume.claim):
            yield Issue("bad-name", where, f"{volume.claim!r} is not a name in Kubernetes", JOINED)
        if volume.sub_path is not None and (
            volume.sub_path.startswith("/") or ".." in PurePosixPath(volume.sub_path).parts
        ):
            message = f"sub_path {volume.sub_path!r} leads out of the claim"
            yield Issue("bad-path", where, message, "use a relative path without '..'")
        taken.append(path)


def claim_issues(claim: object, job: JobSpec) -> Iterator[Issue]:
    """Yield the issues of the volume claim. claim: its document; None if it does not exist."""
    settings, where = job.launch.kubernetes, f"{TABLE}.claim"
    if claim is None:
        yield Issue(
            "no-claim",
            where,
            f"there is no PersistentVolumeClaim {settings.claim!r} in namespace {settings.namespace or 'of kubectl'}",
            "create it, or name one of `kubectl get pvc`",
        )
        return
    spec = claim.get("spec") if isinstance(claim, dict) else None
    modes = spec.get("accessModes") if isinstance(spec, dict) else None
    if job.cluster.nodes > 1 and isinstance(modes, list) and "ReadWriteMany" not in modes:
        message = f"{settings.claim!r} has access modes {', '.join(map(str, modes))}, and the pods "
        yield Issue(
            "claim-not-shared",
            where,
            f"{message}of {job.cluster.nodes} nodes write there",
            "use a claim with access mode ReadWriteMany",
        )


def env_issues(names: Iterable[str], key: str = "env") -> Iterator[Issue]:
    """Yield the issues of the names of environment variables. key: the setting that has them."""
    where = f"{TABLE}.{key}"
    for name in names:
        if name in RESERVED_ENV:
            yield Issue("reserved-variable", where, f"{name} is set for each pod", "leave it out")
        elif key == "env" and not re.fullmatch(VARIABLE, name):
            yield Issue(
                "bad-name",
                where,
                f"{name!r} is not the name of an environment variable",
                "use letters, digits and underscores, and no digit first",
            )
        elif key == "env" and SECRET_NAME.search(name):
            message = f"{name} is a secret by its name, and job.json and the object are readable"
            yield Issue(
                "secret-in-env",
                where,
                message,
                f'put it into a secret of the cluster, and name it: secret_env = {{{name} = "SECRET/KEY"}}',
            )
