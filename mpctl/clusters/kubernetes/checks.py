"""What would prevent a submission to Kubernetes, found before anything is sent to a cluster.

Whether the claim, the runtime or the queue exist only the cluster knows (kubectl.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path, PurePosixPath

from mpctl.clusters.kubernetes.manifest import pod_device
from mpctl.clusters.kubernetes.submission import (
    LOWER_CASE,
    QUALIFIED,
    env_issues,
    is_label,
    is_label_value,
    is_qualified,
    is_quantity,
    is_subdomain,
)
from mpctl.errors import Issue
from mpctl.spec.job import JobSpec
from mpctl.spec.launch import KubernetesSpec

TABLE = "launch.kubernetes"


def submission_issues(job: JobSpec, run_path: Path, *, is_mounted: bool = True) -> list[Issue]:
    """Every reason why the job's settings cannot be submitted; empty when they can. is_mounted:
    whether this machine must see the volume."""
    settings = job.launch.kubernetes
    checks = (
        _required(settings),
        _device(job),
        _names(settings),
        _labels(settings),
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
    if pod_device(job) is None:
        message = "auto, and the job names no cluster whose device is known: pods get GPUs only "
        yield Issue("device-unknown", "launch.device", f"{message}where they are asked for",
                    "say --device cuda or --device cpu")  # fmt: skip


def _names(settings: KubernetesSpec) -> Iterator[Issue]:
    labels = {"namespace": settings.namespace}
    subdomains = {
        key: getattr(settings, key)
        for key in ("claim", "runtime", "queue", "priority_class", "service_account",
                    "image_pull_secret")
    }  # fmt: skip
    for key, name in labels.items():
        if name is not None and not is_label(name):
            yield _bad_name(key, name, f"{LOWER_CASE}, at most 63 characters")
    for key, name in subdomains.items():
        if name is not None and not is_subdomain(name):
            yield _bad_name(key, name, f"{LOWER_CASE}; dots may join several of them")
    if not is_qualified(settings.gpu_resource):
        yield _bad_name("gpu_resource", settings.gpu_resource, QUALIFIED)
    if settings.memory_per_node is not None and not is_quantity(settings.memory_per_node):
        message = f"{settings.memory_per_node!r} is not an amount of memory"
        yield Issue("bad-value", f"{TABLE}.memory_per_node", message,
                    "use a number and Mi, Gi or Ti, such as 512Gi")  # fmt: skip


def _bad_name(key: str, name: str, hint: str) -> Issue:
    return Issue("bad-name", f"{TABLE}.{key}", f"{name!r} is not a name in Kubernetes", hint)


def _labels(settings: KubernetesSpec) -> Iterator[Issue]:
    names = [("node_selector", name) for name in settings.node_selector]
    names += [("tolerations", name) for name in settings.tolerations]
    for key, name in names:
        if not is_qualified(name):
            yield _bad_name(key, name, QUALIFIED)
    for name, value in settings.node_selector.items():
        if not is_label_value(value):
            message = f"{value!r} cannot be the value of the label {name}"
            yield Issue("bad-value", f"{TABLE}.node_selector", message,
                        "use at most 63 letters, digits, '-', '_' and '.'")  # fmt: skip


def _paths(job: JobSpec, run_path: Path, *, is_mounted: bool) -> Iterator[Issue]:
    """The run and all that its ranks read must lie on the claim, at the path that the pods see."""
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
    """The paths that the ranks open beside those of the run directory, by setting. A corpus is
    prepared into the run directory before the submission."""
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
