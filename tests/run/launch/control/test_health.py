"""What the launcher makes of the hosts' reports between two attempts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from mpctl.core.errors import Issue
from mpctl.records.rundir.directory import RunDir
from mpctl.run.hosts.health import HealthReport
from mpctl.run.hosts.probes import HostAnswer, NoAnswer
from mpctl.run.launch.control.cluster import agent_cluster, never
from mpctl.run.launch.control.health import Health, check_hosts, judged, partners
from tests.run.launch.control.agents import LocalAgents

NAMES = {10: "n0", 11: "n1", 12: "n2", 13: "n3"}


def report(**found: Any) -> HealthReport:
    return HealthReport(**{"facts": None, "unix_time": time.time(), **found})


def judge(found: dict[int, HealthReport], silent: dict[int, Issue] | None = None) -> Health:
    reports = {number: report() for number in NAMES} | found
    for number in silent or {}:
        del reports[number]
    return judged(NAMES, reports, silent or {}, sent=time.time())


def test_a_host_with_a_problem_of_its_own_is_bad() -> None:
    health = judge({11: report(folder="does not see the run directory: /runs/a")})
    assert {n: issue.where for n, issue in health.bad.items()} == {11: "n1"}
    assert judge({}).bad == {} and list(judge({}).notes) == []


def test_what_all_hosts_report_is_a_note() -> None:
    health = judge({number: report(folder="cannot write: full") for number in NAMES})
    assert health.bad == {} and list(health.notes) == ["all hosts: cannot write: full"]


def test_the_host_of_most_cut_pairs_is_bad() -> None:
    """n1 reaches nobody; the others reach each other."""
    cut = {10: report(unreachable={1: "timed out"}), 11: report(unreachable={2: "x", 3: "y"})}
    health = judge(cut)
    assert list(health.bad) == [11]
    assert health.bad[11].message == "no connection between it and n0, n2, n3"
    assert "n1 cannot connect to n2: x" in health.notes


def test_of_one_cut_pair_the_last_host_is_left_out() -> None:
    assert list(judge({10: report(unreachable={2: "timed out"})}).bad) == [12]


def test_a_host_that_was_silent_is_bad_and_not_counted_as_cut_off_from_others() -> None:
    silent = {13: Issue("host-silent", "n3", "no answer within 10 s")}
    health = judge({n: report(unreachable={3: "refused"}) for n in (10, 11, 12)}, silent)
    assert list(health.bad) == [13] and health.bad[13].rule == "host-silent"
    assert list(health.notes) == []


def test_clocks_that_differ_are_noted() -> None:
    health = judge({12: report(unix_time=time.time() + 60)})
    assert health.bad == {} and "the clock of n2 is 60.0 s off" in health.notes[0]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (RuntimeError("its node agent ended"), "its node agent ended"),
        ({"code": 0, "output": "[" * 9999, "errors": ""}, "another mpctl?"),
        ("x", "another form"),
        ({"code": None, "output": "", "errors": "no answer within 10 s"}, "no answer within 10 s"),
        ({"code": 1, "output": "", "errors": "ImportError: psutil\n"}, "ImportError: psutil"),
        ({"code": 0, "output": "{}", "errors": ""}, "another mpctl?"),
        ({"code": 0, "output": "", "errors": ""}, "another mpctl?"),
    ],
)
def test_an_answer_that_is_none_says_why(answer: object, words: str) -> None:
    with pytest.raises(NoAnswer, match=words.replace("?", r"\?")):
        HostAnswer.of(answer, 0.0).read(HealthReport)


def test_a_report_is_read_as_it_was_written() -> None:
    found = report(folder="x", unreachable={3: "refused"}, skipped=["no nvidia-smi"])
    answer = {"code": 0, "output": found.model_dump_json(), "errors": ""}
    assert HostAnswer.of(answer, 0.0).read(HealthReport) == found


@pytest.mark.parametrize("hosts", [1, 2, 3, 16, 17, 64, 1000])
def test_each_pair_is_known_to_both_and_all_hosts_are_linked(hosts: int) -> None:
    found = [partners(place, hosts) for place in range(hosts)]
    assert all(place in found[other] for place in range(hosts) for other in found[place])
    assert all(place not in found[place] for place in range(hosts))
    if hosts <= 16:
        assert all(len(others) == hosts - 1 for others in found)
    else:
        assert max(map(len, found)) <= 2 * hosts.bit_length()
    if hosts > 1:
        assert all((place + 1) % hosts in found[place] for place in range(hosts))


def test_real_agents_are_checked(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with agent_cluster(["n0", "n1", "n2"], run, LocalAgents, print, patience=60) as cluster:
        health = check_hosts(cluster.server, cluster.links, cluster.key, needs_gpus=False, is_stopped=never)
        assert health.bad == {} and list(health.reports) == [0, 1, 2]
        assert all(found.facts for found in health.reports.values())
        assert [path.name for path in run.nodes.glob("tmp*")] == []
