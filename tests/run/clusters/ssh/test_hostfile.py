"""Hostfiles: what is read, and that everything wrong is reported at once with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpctl.run.clusters.ssh.hostfile import (
    SshHost,
    first_slots,
    hosts_of_plan,
    parse_hostfile,
    read_hostfile,
    select_hosts,
)

EIGHT = tuple(range(8))


def test_a_hostfile_as_deepspeed_and_openmpi_write_it() -> None:
    text = """\
    # two racks
    n1 slots=8   # the first host is node 0

    ann@n2.cluster slots=8 port=2222
    10.0.0.3
    ann@corp@[2001:db8::1] slots=1
    fe80::1%eth0
    """
    hostfile = parse_hostfile(text, "hosts")
    assert hostfile.issues == ()
    assert hostfile.hosts == (
        SshHost("n1", EIGHT, where="hosts:2"),
        SshHost("n2.cluster", EIGHT, "ann", 2222, "hosts:4"),
        SshHost("10.0.0.3", None, where="hosts:5"),
        SshHost("2001:db8::1", (0,), "ann@corp", None, "hosts:6"),
        SshHost("fe80::1%eth0", None, where="hosts:7"),
    )
    assert hostfile.hosts[3].destination == "ann@corp@2001:db8::1"


def test_everything_wrong_is_reported_at_once() -> None:
    text = """\
n1 slots=0
n2:8
n1 slots=4 slots=4
n3 max_slots=4 port=70000
n4 slots=4
N4 slots=2
n5 slots=²
@n6
"""
    hostfile = parse_hostfile(text, "hosts")
    assert [str(issue) for issue in hostfile.issues] == [
        "hosts:1: slots=0 is not a number from 1 to 4096 (write slots=N, the ranks of the host)",
        "hosts:2: 'n2:8' is not a host name (write `n2 slots=8`, or `n2 port=8` for a port)",
        "hosts:3: slots is given more than once (leave all but one out)",
        "hosts:4: 'max_slots=4' is not known (a line is `HOST [slots=N] [port=N]`; a comment begins with #)",
        "hosts:4: port=70000 is not a number from 1 to 65535 (write port=N)",
        "hosts:6: N4 is already in line 5 (name each host once, with all its slots in one line)",
        "hosts:7: slots=² is not a number from 1 to 4096 (write slots=N, the ranks of the host)",
        "hosts:8: '' in '@n6' is not a user name (write `user@host slots=8`)",
    ]
    assert [host.name for host in hostfile.hosts] == ["n4"]


@pytest.mark.parametrize(
    "name",
    [
        "-oProxyCommand=reboot",
        "n1;reboot",
        "$(reboot)",
        "`reboot`",
        "n1\x1b[2J",
        "fe80::1%$(id)",
        "-l@n1",
        "a b@n1",
        "n/1",
        "n1|x",
        "'n1'",
    ],
)
def test_a_name_that_ssh_or_a_shell_would_take_for_something_else_is_refused(name: str) -> None:
    hostfile = parse_hostfile(f"{name} slots=1", "hosts")
    assert hostfile.hosts == ()
    assert hostfile.issues


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_a_hostfile_without_hosts_shows_an_example_line(text: str) -> None:
    (issue,) = parse_hostfile(text, "hosts").issues
    assert str(issue) == "hosts: names no host (write a line such as `n1 slots=8`)"


def test_a_file_that_cannot_be_read_is_an_issue(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        (issue,) = read_hostfile(path).issues
        assert issue.where == str(path)
        assert message in issue.message
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in read_hostfile(binary).issues[0].message
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfn1 slots=1\r\n")  # as some editors save it
    assert read_hostfile(tmp_path / "marked").hosts[0].name == "n1"


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


def test_include_and_exclude_cannot_be_combined() -> None:
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


@pytest.mark.parametrize(
    ("text", "words"),
    [("n3:0", "slots of n3 cannot be excluded, since hosts:3 does not say slots="), ("n1@n2@n3@::1", "leaves no host")],
)
def test_what_exclude_cannot_do(text: str, words: str) -> None:
    (issue,) = select_hosts(HOSTS, exclude=text).issues
    assert words in issue.message


def test_a_plan_takes_the_first_hosts_and_names_the_others() -> None:
    chosen = hosts_of_plan(HOSTS, 2, 4, "hosts")
    assert (chosen.hosts, chosen.issues) == (HOSTS[:2], ())
    assert chosen.warnings == ("the plan has 2 nodes and takes the first of 4 hosts in hosts; not used: n3, ::1",)


def test_the_hosts_after_those_of_the_plan_are_spare_ones() -> None:
    chosen = hosts_of_plan(HOSTS, 2, 4, "hosts", spares=1)
    assert (chosen.hosts, chosen.issues) == (HOSTS[:3], ())
    assert "not used: ::1" in chosen.warnings[0]
    fewer = hosts_of_plan(HOSTS[:3], 2, 4, "hosts", spares=3)
    assert fewer.hosts == HOSTS[:3]
    assert fewer.warnings == ("launch.spare_nodes is 3, but hosts has 1 spare host",)
    (issue,) = hosts_of_plan(HOSTS, 2, 4, "hosts", spares=2).issues
    assert issue.rule == "slots-match-plan"  # a spare host must have the slots of a node, too


def test_too_few_hosts_are_refused_with_both_ways_out() -> None:
    (issue,) = hosts_of_plan(HOSTS, 5, 4, "hosts").issues
    assert str(issue) == ("hosts: 4 hosts, but the plan has 5 nodes (add hosts, or plan for fewer: --nodes 4)")


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
    assert [(host.name, host.slots) for host in chosen.hosts] == [("n1", (0,)), ("fe80::1", (4,)), ("n3", None)]
