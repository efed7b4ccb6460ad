"""The launch of an elastic run on the hosts that are left, or that there are again (elastic.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mpctl.errors import InputError
from mpctl.launch.cluster import Cluster
from mpctl.launch.control.host_checks import common_machine
from mpctl.launch.elastic import fit_hosts, least_nodes
from mpctl.launch.launch_plan import LaunchPlan, plan_launch
from mpctl.launch.node.device import Device
from mpctl.units import plural


def next_launch(full: LaunchPlan, cluster: Cluster, is_stopped: Callable[[], bool]) -> LaunchPlan:
    """What the next attempt runs, once lost hosts were connected again: `full`, the launch on all
    nodes of the job, or that of an elastic run on the hosts that there are. Raises InputError with
    the reasons when the run cannot go on."""
    job = full.job
    if lost := cluster.recover(least_nodes(job), is_stopped):
        raise InputError(lost)
    hosts = cluster.hosts
    if not job.launch.elastic or len(hosts) >= job.cluster.nodes:
        return full
    plan = fit_hosts(job, len(hosts))
    device: Device = "cuda" if job.launch.device == "cuda" else "cpu"
    if issues := cluster.check(plan, device):
        raise InputError(issues)
    smaller = plan_launch(plan, full.run, common_machine(hosts), hosts=plan.job.cluster.nodes)
    return replace(smaller, warnings=full.warnings, launcher=full.launcher)


def resized_text(plan: LaunchPlan, cluster: Cluster) -> str:
    """What runs from now on, in words."""
    nodes = plan.job.cluster.nodes
    names = ", ".join(host.name for host in cluster.hosts[:nodes])
    return f"going on with {plural(nodes, 'host')} ({names}) at dp {plan.job.sizes['dp']}"
