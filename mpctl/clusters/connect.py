"""The hosts of a bench: whichever backend `mpctl launch` would take for the plan, and a launch that
is ready to run there.

A bench connects for each of its launches anew, as `mpctl launch` does: hosts of an allocation or a
hostfile run nothing of it between two launches. It runs layouts of several sizes over the same
hosts, so that a host may have more slots than a layout has ranks there, which `mpctl launch`
refuses: a bench takes the first of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from mpctl.clusters.backend import Backend
from mpctl.clusters.registry import find_backend
from mpctl.clusters.ssh.backend import use_first_slots
from mpctl.errors import InputError, Issue
from mpctl.hosts.checks import Device, common_machine
from mpctl.hosts.machine import Machine
from mpctl.launch.cluster import Cluster
from mpctl.launch.launch_plan import LaunchPlan, plan_launch
from mpctl.launch.preflight import (
    HostCheck,
    check_launch,
    check_ranks,
    chosen_device,
    launch_warnings,
)
from mpctl.planning.plan import Plan
from mpctl.rundir.directory import RunDir
from mpctl.rundir.launcher import this_launcher

OnEvent = Callable[[str], None]


def training_refusals(plan: Plan, machine: Machine) -> list[Issue]:
    """Every reason, found without contacting a host, why a plan cannot train on its hosts.
    machine: this one, which has the ranks where the plan names no hosts."""
    plan, backend = _with_backend(plan)
    issues = check_launch(plan, machine, host_check=_host_check(backend))
    return [*issues, *backend.check(plan)]


def measuring_refusals(plan: Plan, machine: Machine) -> list[Issue]:
    """The same for ranks that only measure: they read no data and save nothing."""
    plan, backend = _with_backend(plan)
    return [*check_ranks(plan, machine, _host_check(backend)), *backend.check(plan)]


def training_warnings(plan: Plan, machine: Machine) -> list[str]:
    """What there is to warn of before a plan trains. Of hosts that have not been asked yet it is
    not known how many cores share the ranks."""
    _, backend = _with_backend(plan)
    if backend.name == "local":
        return launch_warnings(plan.job, machine)
    enough = replace(machine, cores=plan.job.world_size)
    return launch_warnings(plan.job, enough, hosts=plan.job.cluster.nodes)


@contextmanager
def connected(
    plan: Plan, run: RunDir, on_event: OnEvent, *, warnings: tuple[str, ...] = ()
) -> Iterator[tuple[Cluster, LaunchPlan]]:
    """The hosts of a legal plan that has no refusals, connected until the block ends, and the
    launch of the plan on them. Raises InputError with every reason why a host cannot run it."""
    plan, backend = _with_backend(plan)
    with backend.connect(plan, run, on_event) as cluster:
        hosts = cluster.hosts
        machine = common_machine(hosts)
        if issues := cluster.check(plan, chosen_device(plan.job, machine)):
            raise InputError(issues)
        launch = plan_launch(plan, run, machine, hosts=len(hosts), warnings=warnings)
        names = [host.name for host in hosts]
        launcher = this_launcher(backend.name, job_id=backend.job_id, hosts=names)
        yield cluster, replace(launch, launcher=launcher)


def _with_backend(plan: Plan) -> tuple[Plan, Backend]:
    """The plan on as many slots of its hosts as it has ranks, and what runs it."""
    plan = replace(plan, job=use_first_slots(plan.job))
    return plan, find_backend(plan.job, os.environ)


def _host_check(backend: Backend) -> HostCheck | None:
    """What hosts lack: this machine where it has the ranks; of others nothing is known yet."""
    return None if backend.name == "local" else no_host_check


def no_host_check(plan: Plan, device: Device) -> list[Issue]:
    """A HostCheck for hosts that are not known yet."""
    return []
