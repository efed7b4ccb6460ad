"""A command that runs on a login host: sent over ssh, answered as if it had run here.

`mpctl status --via ssh:LOGIN RUN` starts `PYTHON -P -m mpctl.cli.relayed` there by the user's ssh
(backend.py has its options) and speaks with it:

    there -> here   a line `mpctl-relay/1 VERSION`, then what the command prints; ssh ends with its
                    exit code
    here -> there   a RelayRequest as a line of JSON; then nothing more until this side has gone

Everything that the user typed travels in the request, and PYTHON alone in the remote command line:
no shell of either host reads a value of a job. What the login shell prints before the first line,
such as a message of the day, is dropped. The end of its standard input tells the remote side that
this one has gone (Ctrl-C, a closed terminal, a lost connection), and the command there gets a
SIGINT: without a terminal ssh passes no signal on.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, Literal

from pydantic import BaseModel, ConfigDict, JsonValue

from mpctl import __version__
from mpctl.core.errors import InputError, Issue
from mpctl.run.clusters.ssh.backend import CLIENT_ENVIRONMENT, NO_SSH, ssh_command
from mpctl.run.clusters.ssh.failures import SSH_FAILED, SshWords, ssh_issue
from mpctl.run.clusters.ssh.hostfile import USER, SshHost, is_host_name
from mpctl.run.launch.node.processes import end_processes
from mpctl.spec.launch import SshSpec

GREETING = "mpctl-relay/1"
MOST_LINES, LONGEST_LINE = 10_000, 1 << 16
"""Bounds on what a login shell may print before the greeting."""
TAIL_BYTES = 4096
END_SECONDS, KILL_SECONDS = 5.0, 1.0
FORM = re.compile(r"ssh:(?:(?P<user>[^:/]+)@)?(?P<name>\[[^\]]*\]|[^:@\[\]]+)(?::(?P<python>.+))?", re.DOTALL)
PYTHON = re.compile(r"[^\s\x00-\x1f-][^\s\x00-\x1f]*")
WAYS = "write ssh:HOST, ssh:USER@HOST or ssh:HOST:PYTHON"
WORDS = SshWords(
    program="mpctl",
    hosts="the host of --via",
    python="--via ssh:HOST:PYTHON",
    port="",
    config="",
    timeout="ConnectTimeout in the ssh config",
)

Passed = Literal["COLUMNS", "TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR"]
"""Variables of this terminal that the output there depends on."""


class RelayRequest(BaseModel):
    """Request to the remote side. arguments: of mpctl; job: tables of the job named `-` in the arguments; environment:
    variables to set; via: as typed, for command lines that it shows."""

    model_config = ConfigDict(extra="forbid", strict=True)

    arguments: list[str]
    job: dict[str, JsonValue] | None = None
    environment: dict[Passed, str] = {}
    via: str


@dataclass(frozen=True)
class Login:
    """A login host and its Python with mpctl: a name on the PATH there, an absolute path, or one
    relative to the home directory."""

    host: SshHost
    python: str = "python3"


def read_login(text: str) -> Login:
    """The value of --via. Raises InputError.

    >>> read_login("ssh:ann@login1:~/venv/bin/python")
    Login(host=SshHost(name='login1', slots=None, user='ann', port=None, where=''), \
python='venv/bin/python')
    """
    match = FORM.fullmatch(text)
    if match is None:
        raise InputError.of("via-form", "--via", f"{text[:80]!r} names no login host", WAYS)
    user, python = match["user"], match["python"]
    name = match["name"].removeprefix("[").removesuffix("]")
    issues = []
    if not is_host_name(name) or (user is not None and not USER.fullmatch(user)):
        message = f"{text[:80]!r} has no host name or address, or no user name, that ssh can take"
        issues.append(Issue("via-host", "--via", message, WAYS))
    if python is not None and not PYTHON.fullmatch(python):
        message = f"{python[:80]!r} is not the path of a program: a space, a control character, or "
        issues.append(Issue("via-python", "--via", f"{message}a hyphen at its beginning", WAYS))
    if issues:
        raise InputError(issues)
    host = SshHost(name, user=user)
    return Login(host) if python is None else Login(host, python.removeprefix("~/"))


def login_command(login: Login) -> list[str]:
    """The ssh command, which the request does not change."""
    return ssh_command(SshSpec(), login.host, [login.python, "-P", "-m", "mpctl.cli.relayed"])


def relay(login: Login, request: RelayRequest, environment: Mapping[str, str]) -> int:
    """Run a command on the login host and print what it prints; its exit code. environment: of the
    ssh client. Ctrl-C here is Ctrl-C there; a second one ends the connection.

    Raises InputError where the host cannot be reached, has no mpctl or another version of it, or
    where the connection breaks off, and BrokenPipeError where nobody reads stdout any more.
    """
    with _connected(login_command(login), environment) as ssh:
        assert ssh.stdin is not None and ssh.stdout is not None and ssh.stderr is not None
        said = _Said(ssh.stderr)
        version = _greeted(ssh.stdout)
        if version is None:
            raise InputError([_issue(login, ssh.wait(), said.ended())])
        if version != __version__:
            message = f"it has mpctl {version}, and this machine {__version__}"
            hint = f"install the same version on both, or name another Python: {WORDS.python}"
            raise InputError.of("host-mpctl", login.host.name, message, hint)
        said.is_shown = True
        with suppress(BrokenPipeError):  # it has ended, and its exit code says why
            ssh.stdin.write(request.model_dump_json().encode() + b"\n")
            ssh.stdin.flush()
        try:
            _copy(ssh.stdout, sys.stdout.buffer)
        except KeyboardInterrupt:
            with suppress(BrokenPipeError):
                ssh.stdin.close()
            _copy(ssh.stdout, sys.stdout.buffer)
        code, tail = ssh.wait(), said.ended()
    if code < 0 or code == SSH_FAILED:
        raise InputError([_issue(login, code, tail)])
    return code


@contextmanager
def _connected(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """An ssh client that is ended with the block. It leads a session of its own, so that Ctrl-C
    reaches this process alone."""
    try:
        ssh = subprocess.Popen(
            [*command],
            env={**environment, **CLIENT_ENVIRONMENT},
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except FileNotFoundError:
        raise InputError([NO_SSH._replace(where="--via")]) from None
    try:
        yield ssh
    finally:
        with suppress(OSError):
            if ssh.stdin is not None:
                ssh.stdin.close()
        end_processes([ssh], END_SECONDS, KILL_SECONDS)
        if ssh.stdout is not None:
            ssh.stdout.close()


class _Said:
    """Reader of the stderr of ssh and the remote side. Keeps the end, and shows all further text once is_shown is
    set."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.is_shown, self._tail, self._stream = False, b"", stream
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def ended(self) -> str:
        """The end of what was said, once the client has ended. A shared connection that stays may
        hold the stream open."""
        self._thread.join(KILL_SECONDS)
        return self._tail.decode(errors="replace")

    def _read(self) -> None:
        with self._stream, suppress(OSError):
            while chunk := _some(self._stream):
                self._tail = (self._tail + chunk)[-TAIL_BYTES:]
                if self.is_shown:
                    sys.stderr.buffer.write(chunk)
                    sys.stderr.buffer.flush()


def _greeted(stream: IO[bytes]) -> str | None:
    """Return the version of mpctl there; None if the remote side ended without a greeting. Raises InputError if it says
    too much before."""
    for _ in range(MOST_LINES):
        line = stream.readline(LONGEST_LINE).decode(errors="replace")
        if not line:
            return None
        if line.startswith(f"{GREETING} "):
            return line.removeprefix(GREETING).strip()
    raise InputError.of(
        "via-no-answer",
        "--via",
        f"the login shell prints more than {MOST_LINES:,} lines before it starts mpctl",
        "let its start-up files print nothing where there is no terminal",
    )


def _copy(source: IO[bytes], target: IO[bytes]) -> None:
    while chunk := _some(source):
        target.write(chunk)
        target.flush()


def _some(stream: Any) -> bytes:
    """Return the bytes available, waiting for the first; empty at the end."""
    chunk: bytes = stream.read1(LONGEST_LINE)
    return chunk


def _issue(login: Login, code: int, said: str) -> Issue:
    return ssh_issue(login.host, code, said, python=login.python, seconds=SshSpec().connect_timeout, words=WORDS)
