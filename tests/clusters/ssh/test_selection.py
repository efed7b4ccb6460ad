"""Include and exclude in DeepSpeed's form, and the hosts that a plan takes."""

from __future__ import annotations

import pytest

from mpctl.clusters.ssh.host_line import SshHost
from mpctl.clusters.ssh.hostfile import parse_hostfile
from mpctl.clusters.ssh.selection import first_slots, hosts_of_plan, select_hosts

HOSTS = parse_hostfile("n1 slots=4\nann@n2 slots=4\nn3\n::1 slots=2\n", "hosts").hosts
N1, N2, N3, LOOP = HOSTS


def slots(hosts: tuple[SshHost, ...]) -> dict[str, tuple[int, ...] | None]:
    return {host.name: host.slots for host in hosts}


def test_without_a_filter_all_hosts_are_taken() -> None:
    assert select_hosts(HOSTS).hosts == HOSTS


def test_include_keeps_the_order_of_the_hostfile() -> None:
    chosen = select_hosts(HOSTS, include="n2@n1:0,2")
    assert slots(chosen.hosts) == {"n1": (0, 2), "n2": (0, 1, 2, 3)}
    assert chosen.hosts[1].destination == "ann@n2"


def test_include_chooses_slots_that_the_hostfile_leaves_open_and_of_an_address() -> None:
    chosen = select_hosts(HOSTS, include="n3:6,7@[::1]:1")
    assert slots(chosen.hosts) == {"n3": (6, 7), "::1": (1,)}
    assert slots(select_hosts(HOSTS, include="::1").hosts) == {"::1": (0, 1)}


def test_exclude_removes_hosts_and_slots() -> None:
    chosen = select_hosts(HOSTS, exclude="n1@n2:1@::1")
    assert slots(chosen.hosts) == {"n2": (0, 2, 3), "n3": None}
    without = select_hosts(HOSTS, exclude="n1:0,1,2,3")
    assert "n1" not in slots(without.hosts)


def test_include_and_exclude_cannot_be_given_together() -> None:
    (issue,) = select_hosts(HOSTS, "n1", "n2").issues
    expected = "launch.ssh.include: include and exclude cannot be given together (use one of them)"
    assert str(issue) == expected


def test_everything_wrong_in_a_filter_is_reported_at_once() -> None:
    issues = select_hosts(HOSTS, include="n8@n1:4,9@n2:x@@n3@n3@ann@[::1]:0,0").issues
    assert [issue.message for issue in issues] == [
        "'n2:x' has no slots",
        "'' does not name a host",
        "n3 is named twice",
        "'[::1]:0,0' names a slot twice",
        "'n8' is not in the hostfile",
        "n1 has no slot 4, 9, only 0 to 3 (hosts:1)",
        "'ann' is not in the hostfile",
    ]
    assert {issue.where for issue in issues} == {"launch.ssh.include"}
    assert all(issue.hint for issue in issues)


@pytest.mark.parametrize(("text", "words"), [
    ("n3:0", "slots of n3 cannot be excluded, since hosts:3 does not say slots="),
    ("n1@n2@n3@::1", "leaves no host"),
])  # fmt: skip
def test_what_exclude_cannot_do(text: str, words: str) -> None:
    (issue,) = select_hosts(HOSTS, exclude=text).issues
    assert words in issue.message


def test_a_plan_takes_the_first_hosts_and_names_the_others() -> None:
    chosen = hosts_of_plan(HOSTS, 2, 4, "hosts")
    assert (chosen.hosts, chosen.issues) == (HOSTS[:2], ())
    assert chosen.warnings == (
        "the plan has 2 nodes and takes the first of 4 hosts in hosts; not used: n3, ::1",
    )


def test_too_few_hosts_are_refused_with_both_ways_out() -> None:
    (issue,) = hosts_of_plan(HOSTS, 5, 4, "hosts").issues
    assert str(issue) == (
        "hosts: 4 hosts, but the plan has 5 nodes (add hosts, or plan for fewer: --nodes 4)"
    )


def test_slots_that_disagree_with_the_plan_are_refused_for_each_host() -> None:
    issues = hosts_of_plan((N1, N2, N3, LOOP), 4, 3, "hosts").issues
    assert [str(issue) for issue in issues] == [
        "hosts:1: n1 has 4 slots, but the plan puts 3 ranks on each node (plan for --gpus-per-node "
        "4, or write slots=3, or choose slots with --include n1:0,1,2@...)",
        "hosts:2: n2 has 4 slots, but the plan puts 3 ranks on each node (plan for --gpus-per-node "
        "4, or write slots=3, or choose slots with --include n2:0,1,2@...)",
        "hosts:4: ::1 has 2 slots, but the plan puts 3 ranks on each node (plan for "
        "--gpus-per-node 2, or write slots=3)",
    ]


def test_a_bench_takes_the_first_slots_of_hosts_that_have_more() -> None:
    hosts = [SshHost("n1", (0, 1, 2)), SshHost("fe80::1", (4, 6)), SshHost("n3")]
    assert first_slots(hosts, 2) == "n1:0,1@[fe80::1]:4,6@n3"
    assert first_slots(hosts, 3) is None and first_slots(hosts[2:], 1) is None
    include = first_slots(hosts, 1)
    chosen = select_hosts(hosts, include)
    assert not chosen.issues
    assert [(host.name, host.slots) for host in chosen.hosts] == [
        ("n1", (0,)), ("fe80::1", (4,)), ("n3", None),
    ]  # fmt: skip
