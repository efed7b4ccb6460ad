"""Reports of hosts, pairs and the needs of a job -> findings. Pure functions.

judge_host.py      a host by itself: torch, GPUs, limits, network, run directory
judge_job.py       what a job needs against what a host has
judge_cluster.py   what differs between hosts; pairs that are slow or cannot connect
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from mpctl.doctor.diagnosis import Finding
from mpctl.doctor.documents import CollectiveReport, HostReport, PairResult
from mpctl.doctor.judge_cluster import (
    clock_findings,
    collective_findings,
    difference_findings,
    pair_findings,
)
from mpctl.doctor.judge_host import host_findings
from mpctl.doctor.judge_job import job_findings
from mpctl.doctor.needs import Needs


def judge(
    hosts: Sequence[HostReport],
    needs: Needs,
    *,
    skew: Sequence[float] = (),
    pairs: Sequence[PairResult] = (),
    collectives: Sequence[CollectiveReport] = (),
) -> list[Finding]:
    """Every finding, errors first; the same finding about several hosts is one."""
    each = (chain(host_findings(host, needs, several=len(hosts) > 1), job_findings(host, needs))
            for host in hosts)  # fmt: skip
    every = chain(
        chain.from_iterable(each),
        _number_of_hosts(hosts, needs),
        difference_findings(hosts),
        clock_findings(hosts, skew),
        pair_findings(hosts, pairs),
        collective_findings(collectives),
    )
    return sorted(merged(every), key=lambda finding: finding.status != "error")


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that differ in nothing but their hosts as one with all of these hosts, in order."""
    hosts: dict[tuple[str, ...], list[str]] = {}
    firsts: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        key = (finding.status, finding.rule, finding.where, finding.message, finding.hint)
        firsts.setdefault(key, finding)
        hosts.setdefault(key, []).extend(finding.hosts)
    return [
        first.model_copy(update={"hosts": list(dict.fromkeys(hosts[key]))})
        for key, first in firsts.items()
    ]


def _number_of_hosts(hosts: Sequence[HostReport], needs: Needs) -> Iterator[Finding]:
    if len(hosts) < needs.nodes:
        yield Finding(
            status="error",
            rule="hosts-too-few",
            where="hosts",
            hosts=[],
            message=f"the job needs {needs.nodes} hosts, {len(hosts)} are there",
            hint="add hosts, or plan for fewer: --nodes",
        )
