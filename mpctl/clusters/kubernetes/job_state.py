"""The state of a job and of its pods, read from the JSON that kubectl prints.

What a cluster answers is read as input from anybody: what is missing or of another type counts as
absent, and never raises.

    TrainJob    conditions Suspended, Complete, Failed; none of them true while its pods are waited
                for or run. Its pods have the label jobset.sigs.k8s.io/jobset-name=NAME.
    PyTorchJob  conditions Created, Running, Restarting, Suspended, Succeeded, Failed. Its pods have
                the label training.kubeflow.org/job-name=NAME.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mpctl.clusters.kubernetes.manifest import API_VERSIONS

Phase = Literal["suspended", "pending", "running", "succeeded", "failed"]
RESOURCES = {"TrainJob": "trainjobs", "PyTorchJob": "pytorchjobs"}
POD_LABELS = {
    "TrainJob": "jobset.sigs.k8s.io/jobset-name",
    "PyTorchJob": "training.kubeflow.org/job-name",
}
CONDITION_PHASES: dict[str, Phase] = {
    "Failed": "failed", "Complete": "succeeded", "Succeeded": "succeeded",
    "Suspended": "suspended", "Running": "running",
}  # fmt: skip
"""What a condition that is true means, the one that decides first."""


@dataclass(frozen=True)
class PodStatus:
    """One pod. node: its node rank in the job, None where it cannot be read; host: the machine it
    runs on, empty before; problem: why it does not run, or how it ended; exit_code: of the
    container, None while it runs."""

    name: str
    phase: str
    node: int | None
    host: str
    problem: str
    exit_code: int | None


@dataclass(frozen=True)
class PodJobState:
    """One job. reason: the cluster's words for a phase that is not `running`."""

    phase: Phase
    reason: str
    pods: tuple[PodStatus, ...]


def resource(kind: str) -> str:
    """How kubectl names objects of a kind without mistake: `trainjobs.trainer.kubeflow.org`."""
    return f"{RESOURCES[kind]}.{API_VERSIONS[kind].partition('/')[0]}"


def pod_selector(kind: str, name: str) -> str:
    """The label selector of a job's pods."""
    return f"{POD_LABELS[kind]}={name}"


def job_state(job: object, pods: object) -> PodJobState:
    """The state of a job from its document and the list of its pods."""
    states = tuple(sorted(_pod_states(pods), key=lambda pod: (pod.node is None, pod.node or 0)))
    true = {_text(condition, "type"): condition for condition in _conditions(job)
            if _text(condition, "status") == "True"}  # fmt: skip
    for kind, phase in CONDITION_PHASES.items():
        if kind in true:
            words = (_text(true[kind], "reason"), _text(true[kind], "message"))
            return PodJobState(phase, ": ".join(word for word in words if word), states)
    if any(pod.phase == "Running" for pod in states):
        return PodJobState("running", "", states)
    problems = [pod.problem for pod in states if pod.problem]
    return PodJobState("pending", problems[0] if problems else "", states)


def _pod_states(pods: object) -> Iterator[PodStatus]:
    for pod in _items(pods, "items"):
        labels = {**_table(pod, "metadata", "annotations"), **_table(pod, "metadata", "labels")}
        yield PodStatus(
            name=_text(_table(pod, "metadata"), "name"),
            phase=_text(_table(pod, "status"), "phase"),
            node=_node_rank(labels),
            host=_text(_table(pod, "spec"), "nodeName"),
            problem=_problem(pod),
            exit_code=_exit_code(pod),
        )


def _node_rank(labels: dict[str, object]) -> int | None:
    """The pod's number: the completion index of a TrainJob's; of a PyTorchJob's the Master is 0
    and Worker i is i + 1."""
    index = labels.get("batch.kubernetes.io/job-completion-index")
    if isinstance(index, str) and index.isdecimal():
        return int(index)
    replica = labels.get("training.kubeflow.org/replica-index")
    if isinstance(replica, str) and replica.isdecimal():
        role = labels.get("training.kubeflow.org/replica-type")
        return int(replica) + (role == "worker")
    return None


def _problem(pod: object) -> str:
    """Why a pod does not run: it is not placed, or its container waits or has failed."""
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


def _exit_code(pod: object) -> int | None:
    for container in _items(pod, "status", "containerStatuses"):
        code = _table(container, "state", "terminated").get("exitCode")
        if isinstance(code, int):
            return code
    return None


def _conditions(document: object) -> Sequence[dict[str, object]]:
    return _items(document, "status", "conditions")


def _items(document: object, *path: str) -> Sequence[dict[str, object]]:
    """The tables of the list at a path; empty where there is no list."""
    *tables, last = path
    items = _table(document, *tables).get(last)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _table(document: object, *path: str) -> dict[str, object]:
    """The table at a path; empty where there is none."""
    for key in path:
        document = document.get(key) if isinstance(document, dict) else None
    return document if isinstance(document, dict) else {}


def _text(table: dict[str, object], key: str) -> str:
    value = table.get(key)
    return value if isinstance(value, str) else ""
