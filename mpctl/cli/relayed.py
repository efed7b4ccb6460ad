"""`python -m mpctl.cli.relayed`: a command that another machine sent over ssh.

run/clusters/ssh/login.py is the other side, and says what is exchanged. The command runs as if it had
been typed here, in the home directory, with the job that came with it as its standard input.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading

from mpctl import __version__
from mpctl.cli.entry import main
from mpctl.cli.via import VIA
from mpctl.run.clusters.ssh.login import GREETING, RelayRequest

MOST_BYTES = 1 << 26


def run_relayed() -> None:
    """Greet, read the request, run it, and exit with its exit code."""
    channel = os.dup(0)  # which programs that the command starts do not inherit
    os.write(1, f"\n{GREETING} {__version__}\n".encode())
    line = _read_line(channel)
    if not line:
        return  # the other side wants nothing more, as where versions differ
    request = RelayRequest.model_validate_json(line)
    os.environ.update({str(name): value for name, value in request.environment.items()})
    os.environ[VIA] = request.via
    with tempfile.TemporaryFile() as job:
        job.write(b"" if request.job is None else json.dumps(request.job).encode())
        job.seek(0)
        os.dup2(job.fileno(), 0)
    threading.Thread(target=_end_with, args=(channel,), daemon=True).start()
    main(request.arguments)


def _read_line(channel: int) -> bytes:
    """The first line; empty where the channel ends before it does."""
    read = b""
    while not read.endswith(b"\n"):
        chunk = os.read(channel, 1 << 16)
        if not chunk or len(read) > MOST_BYTES:
            return b""
        read += chunk
    return read


def _end_with(channel: int) -> None:
    """Interrupt the command when the other side has gone: it closes the channel then."""
    while os.read(channel, 1 << 16):
        pass
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


if __name__ == "__main__":
    run_relayed()
