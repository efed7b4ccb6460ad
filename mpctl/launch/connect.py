"""The hosts of a bench: whichever backend `mpctl launch` would take for the plan, and a launch that
is ready to run there.

A bench connects for each of its launches anew, as `mpctl launch` does: hosts of an allocation or a
hostfile run nothing of it between two launches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from mpctl.errors import InputError, Issue
from mpctl.launch.backends.backend import Backend
from mpctl.launch.backends.registry import find_backend
from mpctl.launch.cluster import Cluster
from mpctl.launch.control.host_checks import common_machine
from mpctl.launch.launch_plan import LaunchPlan, plan_launch
from mpctl.launch.node.device import Device
from mpctl.launch.node.machine import Machine
from mpctl.launch.preflight import HostCheck, check_launch, check_ranks, chosen_device
from mpctl.planning.plan import Plan
from mpctl.rundir.directory import RunDir
from mpctl.rundir.launcher import this_launcher

OnEvent = Callable[[str], None]


def training_refusals(plan: Plan, machine: Machine) -> list[Issue]:
    """Every reason, found without contacting a host, why a plan cannot train on its hosts.
    machine: this one, which has the ranks where the plan names no hosts."""
    backend = find_backend(plan.job, os.environ)
    return [*check_launch(plan, machine, host_check=_host_check(backend)), *backend.check(plan)]


def measuring_refusals(plan: Plan, machine: Machine) -> list[Issue]:
    """The same for ranks that only measure: they read no data and save nothing."""
    backend = find_backend(plan.job, os.environ)
    return [*check_ranks(plan, machine, _host_check(backend)), *backend.check(plan)]


@contextmanager
def connected(
    plan: Plan, run: RunDir, on_event: OnEvent, *, warnings: tuple[str, ...] = ()
) -> Iterator[tuple[Cluster, LaunchPlan]]:
    """The hosts of a legal plan that has no refusals, connected until the block ends, and the
    launch of the plan on them. Raises InputError with every reason why a host cannot run it."""
    backend = find_backend(plan.job, os.environ)
    with backend.connect(plan, run, on_event) as cluster:
        hosts = cluster.hosts
        machine = common_machine(hosts)
        if issues := cluster.check(plan, chosen_device(plan.job, machine)):
            raise InputError(issues)
        launch = plan_launch(plan, run, machine, hosts=len(hosts), warnings=warnings)
        names = [host.name for host in hosts]
        launcher = this_launcher(backend.name, job_id=backend.job_id, hosts=names)
        yield cluster, replace(launch, launcher=launcher)


def _host_check(backend: Backend) -> HostCheck | None:
    """What hosts lack: this machine where it has the ranks; of others nothing is known yet."""
    return None if backend.name == "local" else no_host_check


def no_host_check(plan: Plan, device: Device) -> list[Issue]:
    """A HostCheck for hosts that are not known yet."""
    return []
