"""Names that a run directory gives to a scheduler's commands."""

from __future__ import annotations

import pytest

from mpctl.core.errors import InputError
from mpctl.run.clusters.kubernetes.jobs import KubernetesScheduler
from mpctl.run.clusters.slurm.commands import SlurmScheduler
from tests.jobs import job_of


@pytest.mark.parametrize("job_id", ["", "-u root", "1;id", "12,13", "1 2", "--me", "9" * 19, "７"])
def test_what_is_no_number_never_reaches_slurm(job_id: str) -> None:
    scheduler = SlurmScheduler(job_of({}))
    for call in (scheduler.find, scheduler.cancel):
        with pytest.raises(InputError, match="not the number of a Slurm job"):
            call(job_id)


@pytest.mark.parametrize("name", ["", "--all", "-l app=x", "A", "a/b", "a b", "a" * 64, "a-"])
def test_what_is_no_name_never_reaches_kubectl(name: str) -> None:
    scheduler = KubernetesScheduler(job_of({}))
    for call in (scheduler.find, scheduler.cancel):
        with pytest.raises(InputError, match="not the name of an object"):
            call(name)


def test_a_namespace_is_checked() -> None:
    spec = job_of({})
    kubernetes = spec.launch.kubernetes.model_copy(update={"namespace": "x --all-namespaces"})
    launch = spec.launch.model_copy(update={"kubernetes": kubernetes})
    with pytest.raises(InputError, match="not the name of a namespace"):
        KubernetesScheduler(spec.model_copy(update={"launch": launch}))
