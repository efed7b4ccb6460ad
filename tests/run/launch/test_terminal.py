"""Output in terminals of 80 and 40 columns, and what happens when one is closed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mpctl.cli.app import run as mpctl
from mpctl.records.checkpoint.folder import list_checkpoints
from tests.run.launch.command import Launched, arguments, wait_for

CONTROL_C = b"\x03"
ENDLESS = ("--set", "training.steps=100000", "--set", "checkpoint.interval=0")


class Terminal:
    """A launch whose terminal is a pseudo-terminal; all its output is recorded."""

    def __init__(self, argv: list[str], run_dir: Path, columns: int, encoding: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.shown = b""
        self.open = True
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": encoding},
        )
        self.run = Launched(process, run_dir)
        self.slave = slave
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        while self.open:
            if select.select([self.master], [], [], 0.05)[0]:
                try:
                    self.shown += os.read(self.master, 65536)
                except OSError:
                    return

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.shown.decode(errors="replace"))

    def close(self) -> None:
        if self.open:
            self.open = False
            self.reader.join()
            os.close(self.slave)
            os.close(self.master)


# The terminal becomes the controlling one, so that ^C and closing it send their signals.
_CHILD = (
    "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "from mpctl.cli.entry import main; sys.argv[0] = 'mpctl'; main()"
)


@pytest.fixture
def terminal(data: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    columns, encoding = request.param
    argv = arguments(data, tmp_path / "run", *ENDLESS)
    shown = Terminal(argv, tmp_path / "run", columns, encoding)
    yield shown
    shown.close()
    if shown.run.process.poll() is None:
        shown.run.process.kill()


@pytest.mark.parametrize("terminal", [(80, "utf-8")], indirect=True)
def test_it_shows_the_run_saves_at_ctrl_c_and_leaves_the_terminal_as_it_was(
    data: Path, terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    run = terminal.run.at_step(5)
    for flag, rule in (("--resume", "busy"), ("--overwrite", "busy"), ("--json", "occupied")):
        assert mpctl(arguments(data, run.run_dir, flag)) == 2
        shown = capsys.readouterr()
        assert f"run-dir-{rule}" in shown.err + shown.out
    wait_for(lambda: re.search(r"[5-9]/100000", terminal.text))
    line = re.findall(r"step[^\r\n]*tokens/s[^\r\n]*", terminal.text)[-1]
    assert re.search(r"loss \d\.\d+", line) and re.search(r"[\d,]+ tokens/s", line)
    wait_for(lambda: re.search(r"step \d+/100000 +\d+:\d\d:\d\d left .*loss", terminal.text))
    assert len(line.rstrip()) <= 80
    os.write(terminal.master, CONTROL_C)
    run.ended()
    assert run.process.returncode == 130
    assert not run.left_behind()
    wait_for(lambda: "stopped after" in terminal.text)
    assert termios.tcgetattr(terminal.slave) == terminal.before
    assert terminal.shown.rfind(b"\x1b[?25h") > terminal.shown.rfind(b"\x1b[?25l")  # the cursor
    assert "Traceback" not in terminal.text
    summary = run.summary
    assert (summary["status"], summary["signal"]) == ("stopped", signal.SIGINT)
    steps = [step for step, _ in list_checkpoints(run.run_dir / "checkpoints")]
    assert steps == [summary["steps"]] == [run.records[-1]["step"]]
    assert all(rank["agrees"] for rank in summary["plan_beside_run"])


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [(40, "ascii")], indirect=True)
def test_closing_a_narrow_terminal_still_saves(terminal: Terminal) -> None:
    run = terminal.run.at_step(3)
    found = r"step \d+/100000 +\d+:\d\d:\d\d left[^\r\n]*"
    wait_for(lambda: re.search(found, terminal.text))
    line = re.findall(found, terminal.text)[-1]
    assert len(line) <= 40 and "?" not in line
    terminal.close()
    run.ended()
    assert not run.left_behind()
    assert (run.summary["status"], run.summary["signal"]) == ("stopped", signal.SIGHUP)
    assert [step for step, _ in list_checkpoints(run.run_dir / "checkpoints")] == [run.summary["steps"]]
    assert not psutil.pid_exists(run.process.pid) or run.process.returncode is not None
