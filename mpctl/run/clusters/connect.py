"""A plan and its hosts: every reason not to start, before hosts are contacted and once they are
connected; and the hosts of a bench.

A bench connects again for each of its launches, as `mpctl launch` does: hosts of an allocation or a
hostfile run nothing of it between two launches. It runs layouts of several sizes over the same
hosts, so that a host may have more slots than a layout has ranks there, which `mpctl launch`
refuses: a bench takes the first of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from mpctl.core.errors import InputError, Issue
from mpctl.plan.planning.plan import Plan
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.launcher import LauncherRecord, this_launcher
from mpctl.run.clusters.backend import Backend, OnEvent
from mpctl.run.clusters.registry import find_backend
from mpctl.run.clusters.ssh.backend import use_first_slots
from mpctl.run.hosts.checks import common_machine, host_issues
from mpctl.run.hosts.machine import Machine
from mpctl.run.launch.cluster import Cluster
from mpctl.run.launch.launch_plan import LaunchPlan, plan_launch
from mpctl.run.launch.preflight import (
    check_launch,
    check_ranks,
    check_run,
    chosen_device,
    launch_warnings,
    not_of_program,
    runtime_issues,
)
from mpctl.run.launch.resume import Resumption


def launch_issues(
    plan: Plan,
    machine: Machine,
    backend: Backend | None,
    cluster: Cluster | None = None,
    *,
    run: RunDir | None = None,
    resumption: Resumption | None = None,
    overwrite: bool = False,
    only_measures: bool = False,
    is_elsewhere: bool = False,
) -> list[Issue]:
    """Every reason not to start the ranks of a plan; empty when they can start.

    machine: this one, or the least that every connected host has. backend: what runs the plan, None
    where a scheduler does later. cluster: the hosts, once they are connected; before that no host
    is contacted, and only what runs on this machine is compared with it. run: the directory that
    will be written; resumption, overwrite, is_elsewhere: as in check_launch. only_measures: the
    ranks read no data and save nothing.
    """
    device = chosen_device(plan.job, machine)
    if cluster is not None:
        lacking = cluster.check(plan, device)
    elif backend is not None and backend.name == "local":
        lacking = list(host_issues(plan, machine, device))
    else:
        lacking = []
    missing = [] if run is None else list(runtime_issues(plan, resumption))
    if missing:
        issues = missing  # what mpctl's own workers would lack does not matter
    elif only_measures:
        issues = check_ranks(plan, lacking)
    else:
        issues = check_launch(plan, lacking, run, resumption=resumption, replaced=overwrite, is_elsewhere=is_elsewhere)
    if run is not None:
        issues += check_run(plan.job, run, overwrite=overwrite, resume=resumption is not None)
    if cluster is None and backend is not None:
        issues += backend.check(plan)
    return issues


def launcher_of(backend: Backend, cluster: Cluster) -> LauncherRecord:
    """RUN/launcher.json of a launch by this process on connected hosts."""
    names = [host.name for host in cluster.hosts]
    return this_launcher(backend.name, job_id=backend.job_id, hosts=names)


# ---------------------------------------------------------------- of a bench


def bench_issues(plan: Plan, machine: Machine, *, only_measures: bool = False) -> list[Issue]:
    """Every reason, found without contacting a host, why a bench cannot run a plan on its hosts.
    machine: this one, which runs the ranks if the plan names no hosts."""
    plan, backend = _with_backend(plan)
    issues = launch_issues(plan, machine, backend, only_measures=only_measures)
    return [*not_of_program(plan.job, "a bench measures"), *issues]


def bench_warnings(plan: Plan, machine: Machine) -> list[str]:
    """Warnings before a plan trains. How many cores share the ranks is not known of hosts that are
    not connected yet."""
    _, backend = _with_backend(plan)
    if backend.name == "local":
        return launch_warnings(plan.job, machine)
    enough = replace(machine, cores=plan.job.world_size)
    return launch_warnings(plan.job, enough, hosts=plan.job.cluster.nodes)


@contextmanager
def connected(
    plan: Plan, run: RunDir, on_event: OnEvent, *, warnings: tuple[str, ...] = ()
) -> Iterator[tuple[Cluster, LaunchPlan]]:
    """The hosts of a legal plan that has no issues, connected until the block ends, and the launch
    of the plan on them. Raises InputError with every reason why a host cannot run it."""
    plan, backend = _with_backend(plan)
    with backend.connect(plan, run, on_event) as cluster:
        machine = common_machine(cluster.hosts)
        if issues := cluster.check(plan, chosen_device(plan.job, machine)):
            raise InputError(issues)
        launch = plan_launch(plan, run, machine, hosts=len(cluster.hosts), warnings=warnings)
        yield cluster, replace(launch, launcher=launcher_of(backend, cluster))


def _with_backend(plan: Plan) -> tuple[Plan, Backend]:
    """The plan on as many slots of its hosts as it has ranks, without spare hosts, and its
    backend."""
    job = use_first_slots(plan.job)
    launch = job.launch.model_copy(update={"spare_nodes": 0})
    plan = replace(plan, job=job.model_copy(update={"launch": launch}))
    return plan, find_backend(plan.job, os.environ)
