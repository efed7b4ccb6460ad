"""Messages of OpenSSH 9.2 when ssh fails, and the issues that mpctl derives from them.

tests/multinode/test_ssh_failures.py provokes the same messages from a real client and sshd.
"""

from __future__ import annotations

import pytest

from mpctl.run.clusters.ssh.failures import ssh_issue
from mpctl.run.clusters.ssh.hostfile import SshHost

N1 = SshHost("n1")
CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Someone could be eavesdropping on you right now (man-in-the-middle attack)!
It is also possible that a host key has just been changed.
The fingerprint for the ED25519 key sent by the remote host is
SHA256:JTOoGPw8vIsYvRaKakO7eTsGKCo/GmHQib7K689qmaI.
Please contact your system administrator.
Add correct host key in /home/ann/.ssh/known_hosts to get rid of this message.
Offending ED25519 key in /home/ann/.ssh/known_hosts:1
  remove with:
  ssh-keygen -f "/home/ann/.ssh/known_hosts" -R "[127.0.0.1]:22610"
Host key for [127.0.0.1]:22610 has changed and you have requested strict checking.
Host key verification failed.
"""
UNPROTECTED = """\
Permissions 0644 for '/home/ann/key' are too open.
Load key "/home/ann/key": bad permissions
ann@127.0.0.1: Permission denied (publickey).
"""
JUMP = """\
ssh: connect to host jump port 22: Connection refused
kex_exchange_identification: Connection closed by remote host
Connection closed by UNKNOWN port 65535
"""
SILENT = """\
Connection timed out during banner exchange
Connection to 10.255.255.1 port 22 timed out
"""
NOT_SSH = """\
kex_exchange_identification: read: Connection reset by peer
Connection reset by 127.0.0.1 port 22998
"""
TOO_MANY = """\
Received disconnect from 127.0.0.1 port 22610:2: Too many authentication failures
Disconnected from 127.0.0.1 port 22610
"""
# code, stderr, the rule, words of the message, words of the hint
MESSAGES = [
    (
        255,
        "ssh: connect to host n1 port 22: Connection refused",
        "ssh-refused",
        "nothing listens at n1 port 22",
        "start sshd there",
    ),
    (255, JUMP, "ssh-refused", "nothing listens at jump port 22", "start sshd"),
    (
        255,
        "Host key verification failed.\n",
        "ssh-unknown-host-key",
        "the key of the host is not known here",
        "by hand",
    ),
    (255, CHANGED, "ssh-changed-host-key", "than the one in /home/ann/.ssh/known_hosts:1", "remove the old key"),
    (
        255,
        "ann@n1: Permission denied (publickey,password).",
        "ssh-no-permission",
        "refuses the login of ann@n1",
        "ssh-copy-id n1",
    ),
    (255, UNPROTECTED, "ssh-no-permission", "key file /home/ann/key is ignored", "chmod 600 /home"),
    (255, TOO_MANY, "ssh-no-permission", "too many keys", "IdentitiesOnly"),
    (
        255,
        "ssh: connect to host n1 port 22: No route to host",
        "ssh-unreachable",
        "there is no way to n1: No route to host",
        "ProxyJump",
    ),
    (
        255,
        "ssh: connect to host n1 port 22: Network is unreachable",
        "ssh-unreachable",
        "Network is unreachable",
        "same network",
    ),
    (
        255,
        "ssh: connect to host n1 port 22: Connection timed out",
        "ssh-timed-out",
        "did not answer in 10 s",
        "launch.ssh.connect_timeout",
    ),
    (255, SILENT, "ssh-timed-out", "did not answer in 10 s", "firewall"),
    (
        255,
        "ssh: Could not resolve hostname n1: Name or service not known",
        "ssh-unknown-name",
        "the name n1 is not known here",
        "/etc/hosts",
    ),
    (255, NOT_SSH, "ssh-not-served", "closed before the login", "MaxStartups"),
    (
        255,
        "Can't open user config file /no/cfg: No such file or directory",
        "ssh-config",
        "refuses its configuration: Can't open user",
        "launch.ssh.config",
    ),
    (255, "badcfg: line 1: Bad configuration option: blah", "ssh-config", "badcfg: line 1", "correct the ssh config"),
    (255, "Timeout, server n1 not responding.", "ssh-lost", "lost: Timeout, server n1 not responding", "went down"),
    (255, "Connection to 127.0.0.1 closed by remote host.", "ssh-lost", "the connection was lost", "restarted"),
    (255, "", "ssh-failed", "ssh ended with code 255 and no message, as when", "ssh n1"),
    (
        127,
        "bash: line 1: /no/python: No such file or directory",
        "remote-no-python",
        "/no/python: No such file",
        "launch.ssh.python",
    ),
    (126, "bash: line 1: /tmp: Is a directory", "remote-no-python", "Is a directory", "python"),
    (
        1,
        "/usr/bin/python3: No module named mpctl",
        "remote-no-module",
        "its Python (/opt/python) has no module mpctl",
        "install mpctl there",
    ),
    (
        1,
        "/usr/bin/python3: Error while finding module specification for 'mpctl.run.launch' "
        "(ModuleNotFoundError: No module named 'mpctl')",
        "remote-no-module",
        "no module mpctl",
        "launch.ssh.python",
    ),
    (1, "  File x.py, line 1\nSyntaxError: invalid syntax", "remote-old-python", "too old for mpctl", "3.11"),
    (1, "This account is currently not available.", "remote-no-shell", "may not run programs", "another user"),
    (3, "one\ntwo\nthree\nfour", "remote-failed", "ended with code 3: two | three | four", ""),
    (-9, "", "ssh-killed", "its ssh client was killed (SIGKILL)", ""),
]


@pytest.mark.parametrize(("code", "output", "rule", "message", "hint"), MESSAGES)
def test_a_failure_is_named_with_its_host_and_a_way_out(
    code: int, output: str, rule: str, message: str, hint: str
) -> None:
    issue = ssh_issue(N1, code, output, python="/opt/python", seconds=10)
    assert (issue.rule, issue.where) == (rule, "n1")
    assert message in issue.message
    assert hint in issue.hint


def test_what_a_remote_program_writes_is_not_taken_for_a_message_of_ssh() -> None:
    """Only code 255 is ssh's; a traceback of the remote side may contain any words."""
    issue = ssh_issue(N1, 1, "OSError: Connection refused", python="p", seconds=10)
    assert issue.rule == "remote-failed"


def test_control_characters_and_braces_of_the_remote_side_are_harmless() -> None:
    said = "ssh: Could not resolve hostname {x}\x1b[2J: no"
    assert ssh_issue(N1, 255, said, python="p", seconds=1).message == (
        "the name {x}[2J is not known here: ssh: Could not resolve hostname {x}[2J: no"
    )
    assert len(ssh_issue(N1, 1, "x" * 5000, python="p", seconds=1).message) < 300


def test_offered_commands_have_the_user() -> None:
    ann = SshHost("n1", user="ann")
    issue = ssh_issue(ann, 255, "Host key verification failed.", python="p", seconds=1)
    assert issue.hint == "connect once by hand and accept the key: ssh ann@n1"
