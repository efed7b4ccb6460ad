"""Names that Kubernetes accepts: a job's name is derived from the run's, the user's are checked.

A job's name becomes part of the host names of its pods, NAME-node-0-1 and NAME-worker-0, and of the
names of pods, NAME-node-0-1-abcde, which are DNS labels of at most 63 characters that begin with a
letter (RFC 1035). The derived name is therefore at most 40 characters long. It ends with the time
of the submission (UTC), since an object that has ended keeps its name until it is deleted.

>>> job_name("Llama 3 (tuned)", 1792713065.0)
'llama-3-tuned-1022-235105'
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator

from mpctl.errors import Issue

LONGEST_JOB_NAME = 40
LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
LABEL_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
LOWER_CASE = "use lower-case letters, digits and hyphens, with a letter or digit at both ends"
QUALIFIED = "use NAME or PREFIX/NAME, such as nvidia.com/gpu"
RESERVED_ENV = frozenset({
    "PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
    "MASTER_PORT",
})  # fmt: skip
"""Environment variables by which a pod learns its place in the job. Kubeflow sets them; the Trainer
refuses a TrainJob that sets those of torchrun (PET_*)."""


def job_name(run_name: str, when: float) -> str:
    """The name of the object for a run that is submitted at `when`, in seconds since 1970."""
    stamp = time.strftime("%m%d-%H%M%S", time.gmtime(when))
    words = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
    if not words[:1].isalpha():
        words = f"run-{words}"
    kept = words[: LONGEST_JOB_NAME - len(stamp) - 1].strip("-")
    return f"{kept}-{stamp}"


def is_label(name: str) -> bool:
    """Whether a name is a DNS label, such as a namespace's: `team-a`."""
    return re.fullmatch(LABEL, name) is not None


def is_subdomain(name: str) -> bool:
    """Whether a name is DNS labels joined by dots, such as a volume claim's: `runs.team-a`."""
    return len(name) <= 253 and all(is_label(part) for part in name.split("."))


def is_qualified(name: str) -> bool:
    """Whether a name is that of a label, a taint or a resource: `gpu`, `nvidia.com/gpu`."""
    prefix, slash, last = name.rpartition("/")
    is_last = bool(last) and re.fullmatch(LABEL_VALUE, last) is not None
    return is_last and (not slash or is_subdomain(prefix))


def is_label_value(value: str) -> bool:
    """Whether a text can be the value of a label."""
    return re.fullmatch(LABEL_VALUE, value) is not None


def is_quantity(text: str) -> bool:
    """Whether a text is an amount of memory: `512Gi`, `1.5T`, `1048576`."""
    return re.fullmatch(r"[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E)?", text) is not None


def env_issues(names: Iterable[str]) -> Iterator[Issue]:
    """What is wrong with the names of [launch.kubernetes] env."""
    where = "launch.kubernetes.env"
    for name in names:
        if name in RESERVED_ENV:
            yield Issue("reserved-variable", where, f"{name} is set by Kubeflow for each pod",
                        "leave it out")  # fmt: skip
        elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield Issue("bad-name", where, f"{name!r} is not the name of an environment variable",
                        "use letters, digits and underscores, and no digit first")  # fmt: skip
