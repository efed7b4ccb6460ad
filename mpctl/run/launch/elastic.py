"""Layout of an elastic run (`launch.elastic`) on the hosts that are available.

Only data parallelism changes: dp x tp x pp x cp ranks fill whole nodes: at most one for each host,
at most those of the job, at least `launch.min_nodes`. tp, pp, cp, the ranks of a node, the micro
batch and the global batch stay the same; replicas of a smaller dp run more micro batches each. By
the sample law (train/data/samples.py) step s trains on the same samples whatever dp is, so that no sample
is lost or repeated when a run shrinks or grows at a checkpoint.

By hand: 4 nodes of 8 ranks at tp 8, dp 4, global batch 12. On 3 hosts dp 3 (each 4 samples of a
step); on 2 hosts dp 2. With a global batch of 16 and 3 hosts dp 3 does not divide it: dp 2, and one
host idles.
"""

from __future__ import annotations

from mpctl.core.errors import InputError, Issue
from mpctl.core.units import plural
from mpctl.plan.planning.plan import Plan, make_plan
from mpctl.spec.job import JobSpec

WAY_OUT = "use a smaller launch.min_nodes, a global batch that more sizes of dp divide, more hosts"


def fit_hosts(job: JobSpec, hosts: int) -> Plan:
    """The legal plan with the most replicas for so many hosts.

    job: as it was planned for all its nodes. Raises InputError, with a reason for every number of
    nodes, when there is no such plan.
    """
    most, least = min(hosts, job.cluster.nodes), least_nodes(job)
    reasons: list[str] = []
    for nodes in range(most, least - 1, -1):
        plan = on_nodes(job, nodes)
        if isinstance(plan, Plan):
            return plan
        reasons.append(f"{plural(nodes, 'node')}: {plan}")
    there = f"{plural(hosts, 'host')} of {job.cluster.nodes}"
    why = "; ".join(reasons) or f"launch.min_nodes is {least}"
    message = f"the run cannot go on with {there} ({why})"
    raise InputError.of("elastic", "launch.elastic", message, WAY_OUT)


def on_nodes(job: JobSpec, nodes: int) -> Plan | str:
    """The plan of the job at the dp that fills so many nodes, or why there is none."""
    ranks = nodes * (job.cluster.gpus_per_node or 1)
    replica = job.world_size // job.sizes["dp"]
    if ranks % replica:
        return f"{plural(ranks, 'rank')} hold no whole number of replicas of {replica} ranks each"
    dp = ranks // replica
    plan = make_plan(
        job.model_copy(
            update={
                "cluster": job.cluster.model_copy(update={"nodes": nodes}),
                "parallel": job.parallel.model_copy(update={"dp": dp}),
                "launch": job.launch.model_copy(update={"max_nodes": job.cluster.nodes}),
            }
        )
    )
    if plan.errors:
        return f"dp {dp}: " + "; ".join(check.message for check in plan.errors)
    return plan


def least_nodes(job: JobSpec) -> int:
    """The fewest nodes that the job may run on: all of them unless it is elastic."""
    return job.launch.min_nodes or 1 if job.launch.elastic else job.cluster.nodes


def elastic_issues(job: JobSpec) -> list[Issue]:
    """Return the issues of the job's `launch.elastic` and `launch.min_nodes`."""
    launch, nodes = job.launch, job.cluster.nodes
    if launch.min_nodes is None or (launch.elastic and launch.min_nodes <= nodes):
        return []
    if not launch.elastic:
        message = f"{launch.min_nodes}, but launch.elastic is false: the run needs all its nodes"
        return [Issue("elastic", "launch.min_nodes", message, "add --set launch.elastic=true")]
    message = f"{launch.min_nodes} is more than the {plural(nodes, 'node')} of the job"
    return [Issue("elastic", "launch.min_nodes", message, f"use 1 to {nodes}")]
