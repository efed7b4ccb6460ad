"""Why an ssh ended: its exit code and messages as an issue that names the host and a way out.

ssh returns the exit code of the remote program, and 255 for everything that went wrong before or
around it. Refused, unknown key, no permission and unreachable are told apart by its message alone.
Messages: OpenSSH 9.2, as tests/clusters/ssh/test_failures.py records them from a real client.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from mpctl.clusters.ssh.command import ALIVE_COUNT, ALIVE_SECONDS
from mpctl.clusters.ssh.host_line import SshHost
from mpctl.errors import Issue
from mpctl.hosts.checks import unshared_issue

SSH_FAILED, NOT_EXECUTABLE, NOT_FOUND = 255, 126, 127
SAID_NOTHING = " and no message, as when the program that it ran is killed"
LAST_LINES, LONGEST_LINE = 3, 200


@dataclass(frozen=True, slots=True)
class FailureKind:
    """A message of ssh or of the remote side, what it means and what to do.

    In meaning and way_out {host} is the host as ssh is given it, {line} the line that matched, and
    {1} the first group of the pattern.
    """

    rule: str
    pattern: re.Pattern[str]
    meaning: str
    way_out: str


def _kind(rule: str, pattern: str, meaning: str, way_out: str) -> FailureKind:
    return FailureKind(rule, re.compile(pattern, re.I), meaning, way_out)


# The first that matches counts: what a message is only a consequence of stands above it.
SSH_KINDS = (
    _kind(
        "ssh-config",
        r"Bad configuration option|Can't open user config file|Bad owner or permissions on|"
        r"terminating, \d+ bad configuration|keyword .* extra arguments",
        "the ssh client refuses its configuration: {line}",
        "correct the ssh config, or name another in launch.ssh.config",
    ),
    _kind(
        "ssh-unknown-name",
        r"Could not resolve hostname ([^\s:]+)",
        "the name {1} is not known here: {line}",
        "correct the hostfile, or give the name an address: /etc/hosts, DNS, or HostName in the "
        "ssh config",
    ),
    _kind(
        "ssh-changed-host-key",
        r"REMOTE HOST IDENTIFICATION HAS CHANGED[\s\S]*?Offending \S+ key in (\S+)",
        "the host shows another key than the one in {1}",
        "if the host was reinstalled, remove the old key with the ssh-keygen command that "
        "`ssh {host}` prints, and accept the new one; if not, another machine answers in its place",
    ),
    _kind(
        "ssh-changed-host-key",
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "the host shows another key than the one that is known here",
        "remove the old key if the host was reinstalled: ssh-keygen -R {name}",
    ),
    _kind(
        "ssh-unknown-host-key",
        r"Host key verification failed",
        "the key of the host is not known here",
        "connect once by hand and accept the key: ssh {host}",
    ),
    _kind(
        "ssh-no-permission",
        r"Too many authentication failures",
        "the host refuses the login after too many keys were tried",
        "name the right key: IdentityFile and IdentitiesOnly yes in the ssh config",
    ),
    _kind(
        "ssh-no-permission",
        r'Load key "([^"]+)": bad permissions[\s\S]*Permission denied',
        "the host refuses the login, and the key file {1} is ignored since others may read it",
        "protect it: chmod 600 {1}",
    ),
    _kind(
        "ssh-no-permission",
        r"(\S+): Permission denied \(([^)]*)\)",
        "the host refuses the login of {1}, no key was accepted (it takes: {2})",
        "put your key there (ssh-copy-id {host}), load a key with a pass phrase into ssh-agent, or "
        "name key and user in the ssh config (IdentityFile, User)",
    ),
    _kind(
        "ssh-refused",
        r"connect to host (\S+) port (\d+): Connection refused",
        "nothing listens at {1} port {2}",
        "start sshd there, or give the right port: `{name} port=N` in the hostfile, Port in the "
        "ssh config",
    ),
    _kind(
        "ssh-unreachable",
        r"connect to host (\S+) port (\d+): (No route to host|Network is unreachable|Host is down)",
        "there is no way to {1}: {3}",
        "check that the host is up and in the same network, or set ProxyJump in the ssh config",
    ),
    _kind(
        "ssh-lost",
        r"Timeout, server \S+ not responding",
        "the connection was lost: the host did not answer for {alive} s",
        "look whether the host or its network went down",
    ),
    _kind(
        "ssh-timed-out",
        r"(timed out)",
        "the host did not answer in {seconds} s: {line}",
        "check that the host is up and no firewall drops the packets, or raise "
        "launch.ssh.connect_timeout",
    ),
    _kind(
        "ssh-not-served",
        r"kex_exchange_identification|banner exchange|Connection (?:closed|reset) by \S+ port",
        "the connection was closed before the login: {line}",
        "check the port, the jump host or ProxyCommand, and MaxStartups of the host's sshd",
    ),
    _kind(
        "ssh-lost",
        r"closed by remote host|Broken pipe|Connection reset|Connection to \S+ closed",
        "the connection was lost: {line}",
        "look whether the host was restarted or its sshd ended",
    ),
)
NO_LOGIN = _kind(
    "remote-no-shell",
    r"account is currently not available|This account",
    "the user may not run programs there: {line}",
    "use another user: `user@{name}` in the hostfile",
)
NO_MODULE = _kind(
    "remote-no-module",
    r"No module named '?([\w.]+)'?",
    "its Python ({python}) has no module {1}",
    "install mpctl there as it is here, or name the right interpreter in launch.ssh.python",
)
OLD_PYTHON = _kind(
    "remote-old-python",
    r"SyntaxError|cannot import name '\w+' from '(?:typing|enum|dataclasses)'",
    "its Python ({python}) is too old for mpctl",
    "name a Python of version 3.11 or newer in launch.ssh.python",
)


@dataclass(frozen=True, slots=True)
class SshEnding:
    """How the ssh of a host ended.

    code: its exit code, negative for a signal; output: what it and the remote program wrote to
    stderr; python: the interpreter that it was to start; connect_timeout: in seconds.
    """

    host: SshHost
    code: int
    output: str
    python: str
    connect_timeout: int

    @property
    def issue(self) -> Issue:
        """Why it ended, what is wrong on which host, and a way out."""
        if self.code < 0:
            return self._issue("ssh-killed", f"its ssh client was killed ({_signal(-self.code)})")
        if self.code == SSH_FAILED:
            return self._first_of(SSH_KINDS) or self._no_message()
        if self.code in (NOT_FOUND, NOT_EXECUTABLE):
            message = f"Python could not be started there: {self._last_line()}"
            hint = "install Python and mpctl there as they are here, or name the interpreter in "
            return self._issue("remote-no-python", message, f"{hint}launch.ssh.python")
        unshared = unshared_issue(self.host.name, _printable_lines(self.output))
        known = self._first_of((NO_LOGIN, NO_MODULE, OLD_PYTHON))
        return unshared or known or self._remote_failure()

    def _first_of(self, kinds: tuple[FailureKind, ...]) -> Issue | None:
        for kind in kinds:
            match = kind.pattern.search(self.output)
            if match is not None:
                return self._of_kind(kind, match)
        return None

    def _of_kind(self, kind: FailureKind, match: re.Match[str]) -> Issue:
        start = self.output.rfind("\n", 0, match.start()) + 1
        words = [match.group(0), *(group or "" for group in match.groups())]
        values = {
            "host": self.host.destination,
            "name": self.host.name,
            "line": self.output[start:].splitlines()[0],
            "python": self.python,
            "seconds": self.connect_timeout,
            "alive": ALIVE_SECONDS * ALIVE_COUNT,
        }
        meaning, way_out = (
            text.format(
                *map(_printable, words), **{k: _printable(str(v)) for k, v in values.items()}
            )
            for text in (kind.meaning, kind.way_out)
        )
        return self._issue(kind.rule, meaning, way_out)

    def _no_message(self) -> Issue:
        said = f": {self._last_line()}" if self.output.strip() else SAID_NOTHING
        message = f"ssh ended with code {SSH_FAILED}{said}"
        return self._issue("ssh-failed", message, f"try it by hand: ssh {self.host.destination}")

    def _remote_failure(self) -> Issue:
        message = f"the node agent ended with code {self.code}"
        return self._issue("remote-failed", f"{message}: {self._last_line()}")

    def _issue(self, rule: str, message: str, hint: str = "") -> Issue:
        return Issue(rule, self.host.name, message, hint)

    def _last_line(self) -> str:
        lines = [line for line in self.output.splitlines() if line.strip()]
        return _printable(" | ".join(line.strip() for line in lines[-LAST_LINES:])) or "no message"


def _printable(text: str) -> str:
    """Without control characters, which a remote side could send to the terminal."""
    shown = "".join(character for character in text.strip() if character.isprintable())
    return shown if len(shown) <= LONGEST_LINE else f"{shown[:LONGEST_LINE]}..."


def _printable_lines(text: str) -> str:
    return "\n".join(map(_printable, text.splitlines()))


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
