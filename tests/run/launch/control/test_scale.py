"""What one more host costs the launcher: bytes of its reports and of status.json, reports a second.

`python -m benchmarks.launcher_scale` measures processor time.
"""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mpctl.records.rundir.breadcrumb import BreadcrumbState
from mpctl.records.rundir.collective_log import CollectiveProgress
from mpctl.run.hosts.machine import raise_file_limit
from mpctl.run.launch import status_file
from mpctl.run.launch.attempt import AttemptPhase, AttemptState, NodeState, RankState, report_seconds
from mpctl.run.launch.control.cluster import AgentAttempt
from mpctl.run.launch.control.messages import Report, encode
from mpctl.run.launch.control.server import ControlServer, HostLink
from mpctl.run.launch.slow_parts import SlowPartsMonitor
from mpctl.run.launch.status_file import LONGEST_STATUS, STATUS_SECONDS, StatusFile, read_status
from mpctl.run.launch.verdict import WaitGraph
from mpctl.spec.load import load_job
from tests.run.launch.control.training_hosts import RANKS, STAGES, node_state

HOSTS = 20


def test_a_host_takes_few_bytes(tmp_path: Path) -> None:
    """8 ranks on each, in 6 to 8 groups: 1,000 hosts stay below 1 MB."""
    state = AttemptState([node_state(node, HOSTS) for node in range(HOSTS)])
    status = StatusFile(tmp_path / "status.json")
    status.write(state, AttemptPhase.RUNNING)
    assert status.path.stat().st_size <= 1000 * HOSTS
    assert len(encode(Report(1, state.nodes[0]))) <= 16_000
    report = read_status(status.path)
    assert report is not None
    without_steps = {rank: seen.breadcrumb.collectives for rank, seen in state.ranks.items()}
    assert {r: s.breadcrumb.collectives for r, s in report.state.ranks.items()} == without_steps
    assert report.state.ranks == state.ranks


def waiting(state: RankState, place: int, *more: int) -> RankState:
    """A rank that waits in a group of its own, by its place, and has started some more there."""
    groups = [*state.breadcrumb.collectives.groups]
    for at in (place, *more):
        groups[at] = replace(groups[at], started=groups[at].started + 1)
    progress = CollectiveProgress(tuple(groups), place, groups[place].started)
    return replace(state, breadcrumb=replace(state.breadcrumb, collectives=progress))


def test_the_file_of_a_large_world_says_whom_ranks_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 waits in its tp group, where all others are one collective behind."""
    nodes = [node_state(node, HOSTS) for node in range(HOSTS)]
    first = {**nodes[0].ranks, 1: waiting(nodes[0].ranks[1], 1, 2)}
    state = AttemptState([replace(nodes[0], ranks=first), *nodes[1:]])
    status = StatusFile(tmp_path / "status.json")
    status.write(state, AttemptPhase.RUNNING)
    whole = status.path.stat().st_size
    sizes = []
    monkeypatch.setattr(status_file, "WHOLE_RANKS", HOSTS)
    for largest in (whole, 100):
        monkeypatch.setattr(status_file, "LARGEST", largest)
        status.write(state, AttemptPhase.RUNNING)
        sizes.append(status.path.stat().st_size)
        report = read_status(status.path)
        assert report is not None
        seen = report.state.collectives()
        if largest > 100:
            assert WaitGraph(seen).waits.keys() == {1}
            for queued in (False, True):
                was, now = (WaitGraph(c, queued=queued) for c in (state.collectives(), seen))
                assert (was.ends, was.missed_by(0)) == (now.ends, now.missed_by(0))
        else:
            assert not any(progress.groups for progress in seen.values())
    assert sizes[1] < sizes[0] < 0.75 * whole


def test_a_large_world_is_written_less_often_and_reports_less_often(tmp_path: Path) -> None:
    status = StatusFile(tmp_path / "status.json")
    for ranks, pause in ((8, STATUS_SECONDS), (8000, 4.0), (100_000, LONGEST_STATUS)):
        state = AttemptState([NodeState(ranks=dict.fromkeys(range(ranks), RankState()))])
        begin = time.monotonic()
        status.write(state, AttemptPhase.RUNNING)
        assert pause <= status.next_write - begin <= pause + time.monotonic() - begin
    assert [report_seconds(hosts) for hosts in (1, 500, 1000)] == [1.0, 1.0, 2.0]


def test_only_what_changed_is_made_anew() -> None:
    links = [HostLink(node, f"n{node}") for node in range(3)]
    attempt = AgentAttempt(ControlServer([]), links, 1, "127.0.0.1:1", dict)
    for link in links:
        link.reports[1] = NodeState(node=link.node)
    before = attempt.snapshot().nodes
    rank = RankState(breadcrumb=BreadcrumbState(start=3))
    links[1].reports[1] = NodeState(node=1, ranks={0: rank})
    links[2].lost = "gone"
    after = attempt.snapshot().nodes
    assert after[0] is before[0] and after[1] is not before[1]
    assert after[1].ranks == {0: rank} and after[2].lost == "gone"
    links[2].lost = ""
    assert attempt.snapshot().nodes[2].lost == ""
    assert attempt.poll() is AttemptPhase.STARTING


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert raise_file_limit(512) == 512
        assert raise_file_limit(300) == 512
        if hard != resource.RLIM_INFINITY:
            assert raise_file_limit(hard + 1) == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_links_of_a_large_pipeline_are_compared_in_time(tmp_path: Path) -> None:
    """1,600 ranks have 2,800 channels; each was compared with each: 20 s."""
    hosts, settings = 200, {"parallel.tp": RANKS, "parallel.pp": STAGES}
    nodes = {"cluster.nodes": hosts, "cluster.gpus_per_node": RANKS}
    job = load_job("demo", {**settings, **nodes})
    state = AttemptState([node_state(node, hosts) for node in range(hosts)])
    slow = SlowPartsMonitor(job, tmp_path / "slow.jsonl", lambda parts, words: None)
    begin = time.thread_time()
    slow.check(state)
    assert time.thread_time() - begin < 3


@pytest.mark.parametrize("content", ['{"schema": "mpctl.attempt/3"}', "[" * 100_000, "[1]"])
def test_a_broken_status_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "status.json").write_text(content)
    assert read_status(tmp_path / "status.json") is None
