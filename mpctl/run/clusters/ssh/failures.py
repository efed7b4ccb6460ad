"""Why an ssh ended: its exit code and messages as an issue that names the host and a way out.

ssh returns the exit code of the remote program, and 255 for everything that went wrong before or
around it. Only its message distinguishes refused, unknown key, no permission and unreachable.
Messages: OpenSSH 9.2; tests/multinode/test_ssh_failures.py gets them from a real client and sshd.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from mpctl.core.errors import Issue
from mpctl.run.clusters.ssh.hostfile import SshHost
from mpctl.run.hosts.checks import unshared_issue
from mpctl.run.launch.diagnose import signal_name

SSH_FAILED, NOT_EXECUTABLE, NOT_FOUND = 255, 126, 127
LAST_LINES, LONGEST_LINE = 3, 200


class SshFailure(NamedTuple):
    """A message of ssh or of the remote side, what it means and what to do.

    In meaning and way_out {host} is the host as an argument of ssh, {name} the same without a user,
    {line} the line that matched, {1} the first group of the pattern, and the fields of SshWords
    stand under their names.
    """

    rule: str
    pattern: str
    meaning: str
    way_out: str


class SshWords(NamedTuple):
    """Names that a fix uses for a user's settings. program: that ssh starts there; hosts: where the host was named;
    python, timeout: the settings of the interpreter there and of the time to connect; port, config: other ways to give
    the port and the ssh config."""

    program: str = "the node agent"
    hosts: str = "the hostfile"
    python: str = "launch.ssh.python"
    timeout: str = "launch.ssh.connect_timeout"
    port: str = "`{name} port=N` in the hostfile, "
    config: str = ", or name another in launch.ssh.config"


OF_A_HOSTFILE = SshWords()
# The first match counts: a cause comes before messages that are its consequence.
OF_SSH = (
    SshFailure(
        "ssh-config",
        r"bad configuration option|Can't open user config file|Bad owner or permissions on|"
        r"keyword .* extra arguments",
        "the ssh client refuses its configuration: {line}",
        "correct the ssh config{config}",
    ),
    SshFailure(
        "ssh-unknown-name",
        r"Could not resolve hostname ([^\s:]+)",
        "the name {1} is not known here: {line}",
        "correct {hosts}, or give the name an address: /etc/hosts, DNS, or HostName in the ssh config",
    ),
    SshFailure(
        "ssh-changed-host-key",
        r"REMOTE HOST IDENTIFICATION HAS CHANGED(?:[\s\S]*?Offending \S+ key in (\S+))?",
        "the host shows another key than the one in {1}",
        "if the host was reinstalled, remove the old key with the ssh-keygen command that "
        "`ssh {host}` prints, and accept the new one; if not, another machine answers in its place",
    ),
    SshFailure(
        "ssh-unknown-host-key",
        r"Host key verification failed",
        "the key of the host is not known here",
        "connect once by hand and accept the key: ssh {host}",
    ),
    SshFailure(
        "ssh-no-permission",
        r"Too many authentication failures",
        "the host refuses the login after too many keys were tried",
        "name the right key: IdentityFile and IdentitiesOnly yes in the ssh config",
    ),
    SshFailure(
        "ssh-no-permission",
        r'Load key "([^"]+)": bad permissions[\s\S]*Permission denied',
        "the host refuses the login, and the key file {1} is ignored since others may read it",
        "protect it: chmod 600 {1}",
    ),
    SshFailure(
        "ssh-no-permission",
        r"(\S+): Permission denied \(([^)]*)\)",
        "the host refuses the login of {1}, no key was accepted (it takes: {2})",
        "put your key there (ssh-copy-id {host}), load a key with a pass phrase into ssh-agent, or "
        "name key and user in the ssh config (IdentityFile, User)",
    ),
    SshFailure(
        "ssh-refused",
        r"connect to host (\S+) port (\d+): Connection refused",
        "nothing listens at {1} port {2}",
        "start sshd there, or give the right port: {port}Port in the ssh config",
    ),
    SshFailure(
        "ssh-unreachable",
        r"connect to host (\S+) port (\d+): (No route to host|Network is unreachable|Host is down)",
        "there is no way to {1}: {3}",
        "check that the host is up and in the same network, or set ProxyJump in the ssh config",
    ),
    SshFailure(
        "ssh-timed-out",
        r"timed out",
        "the host did not answer in {seconds} s: {line}",
        "check that the host is up and no firewall drops the packets, or raise {timeout}",
    ),
    SshFailure(
        "ssh-not-served",
        r"kex_exchange_identification|banner exchange|Connection (?:closed|reset) by \S+ port",
        "the connection was closed before the login: {line}",
        "check the port, the jump host or ProxyCommand, and MaxStartups of the host's sshd",
    ),
    SshFailure(
        "ssh-lost",
        r"server \S+ not responding|closed by remote host|Broken pipe|Connection reset|"
        r"Connection to \S+ closed",
        "the connection was lost: {line}",
        "look whether the host or its network went down, or its sshd was restarted",
    ),
)
OF_THE_HOST = (
    SshFailure(
        "remote-no-shell",
        r"account is currently not available|This account",
        "the user may not run programs there: {line}",
        "use another user: `user@{name}` in {hosts}",
    ),
    SshFailure(
        "remote-no-module",
        r"No module named '?([\w.]+)'?",
        "its Python ({program_python}) has no module {1}",
        "install mpctl there as it is here, or name the right interpreter: {python}",
    ),
    SshFailure(
        "remote-old-python",
        r"SyntaxError|cannot import name '\w+' from '(?:typing|enum|dataclasses)'",
        "its Python ({program_python}) is too old for mpctl",
        "name a Python of version 3.11 or newer: {python}",
    ),
)


def ssh_issue(
    host: SshHost, code: int, output: str, *, python: str, seconds: int, words: SshWords = OF_A_HOSTFILE
) -> Issue:
    """Return the reason why the ssh of a host ended, with a fix.

    code: its exit code, negative for a signal; output: what it and the remote program wrote to
    stderr; python: the interpreter to start; seconds: the time limit of connecting; words: how the
    user names what is to be changed.
    """
    said = "\n".join(_printable(line) for line in output.splitlines() if line.strip())
    last = " | ".join(said.split("\n")[-LAST_LINES:]) or "no message"

    def known(failures: Sequence[SshFailure]) -> Issue | None:
        for failure in failures:
            if match := re.search(failure.pattern, said, re.I):
                line = said[said.rfind("\n", 0, match.start()) + 1 :].split("\n")[0]
                groups = (match[0], *(group or "known_hosts" for group in match.groups()))
                names = {"host": host.destination, "name": host.name, "line": line}
                names |= {"program_python": python, "seconds": str(seconds), **words._asdict()}
                names["port"] = words.port.format(name=host.name)
                meaning, way_out = (text.format(*groups, **names) for text in (failure.meaning, failure.way_out))
                return Issue(failure.rule, host.name, meaning, way_out)
        return None

    if code < 0:
        return Issue("ssh-killed", host.name, f"its ssh client was killed ({signal_name(-code)})")
    if code in (NOT_FOUND, NOT_EXECUTABLE):
        hint = f"install Python and mpctl there as they are here, or name the interpreter: {words.python}"
        message = f"Python could not be started there: {last}"
        return Issue("remote-no-python", host.name, message, hint)
    if code == SSH_FAILED:
        why = f": {last}" if said else " and no message, as when the program that it ran is killed"
        hint = f"try it by hand: ssh {host.destination}"
        unknown = Issue("ssh-failed", host.name, f"ssh ended with code {code}{why}", hint)
        return known(OF_SSH) or unknown
    failed = Issue("remote-failed", host.name, f"{words.program} ended with code {code}: {last}")
    return unshared_issue(host.name, said) or known(OF_THE_HOST) or failed


def _printable(text: str) -> str:
    """Without control characters, which a remote side could send to the terminal."""
    shown = "".join(character for character in text.strip() if character.isprintable())
    return shown if len(shown) <= LONGEST_LINE else f"{shown[:LONGEST_LINE]}..."
