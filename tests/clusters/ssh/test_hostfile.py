"""Hostfiles: what is read, and that everything wrong is reported at once with file and line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mpctl.clusters.ssh.host_line import SshHost
from mpctl.clusters.ssh.hostfile import parse_hostfile, read_hostfile

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
        "hosts:4: 'max_slots=4' is not known (a line is `HOST [slots=N] [port=N]`; a comment "
        "begins with #)",
        "hosts:4: port=70000 is not a number from 1 to 65535 (write port=N)",
        "hosts:6: N4 is already in line 5 (name each host once, with all its slots in one line)",
        "hosts:7: slots=² is not a number from 1 to 4096 (write slots=N, the ranks of the host)",
        "hosts:8: '' in '@n6' is not a user name (write `user@host slots=8`)",
    ]
    assert [host.name for host in hostfile.hosts] == ["n4"]


@pytest.mark.parametrize(
    "name",
    ["-oProxyCommand=reboot", "n1;reboot", "$(reboot)", "`reboot`", "n1\x1b[2J", "fe80::1%$(id)",
     "-l@n1", "a b@n1", "n/1", "n1|x", "'n1'"],
)  # fmt: skip
def test_a_name_that_ssh_or_a_shell_would_take_for_something_else_is_refused(name: str) -> None:
    hostfile = parse_hostfile(f"{name} slots=1", "hosts")
    assert hostfile.hosts == ()
    assert hostfile.issues


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_a_hostfile_without_hosts_says_what_a_line_looks_like(text: str) -> None:
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


def test_a_thousand_hosts_take_no_time(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("".join(f"gpu{n:04} slots=8\n" for n in range(1000)))
    started = time.process_time()
    hosts = read_hostfile(file).hosts
    assert time.process_time() - started < 1
    assert [hosts[0].name, hosts[999].name, len(hosts)] == ["gpu0000", "gpu0999", 1000]
