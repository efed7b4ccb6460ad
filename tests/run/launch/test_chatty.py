"""A program that prints much holds up neither the launcher nor its end. Slow: real launches."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from mpctl.run.launch.status_file import STATUS_SECONDS
from tests.run.launch.command import PATIENCE
from tests.run.launch.programs import run_program, write

CHATTY = """\
if [ "$1" = lines ]; then
  yes "$(printf 'x%.0s' $(seq 199))" | head -c 100000000
else
  head -c 300000000 /dev/zero | tr '\\0' x
fi
touch printed-$RANK
sleep "$2"
"""
REACTION_SECONDS = 8.0
"""On a machine that does much else; with all lines read at once it was half a minute and more."""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["lines", "line"])
def test_the_status_is_written_beside_a_flood_and_a_stop_is_heard(tmp_path: Path, what: str) -> None:
    """100 MB of lines or 300 MB without a line's end, of each of two ranks."""
    write(tmp_path / "here", "chatty.sh", CHATTY)
    more = ("--set", "launch.stop_seconds=1")
    run = run_program(tmp_path / "run", f"bash chatty.sh {what} 600", *more)
    status, printed = run.run_dir / "nodes" / "status.json", tmp_path / "here" / "printed-0"
    written, changed, longest, told = 0, time.monotonic(), 0.0, 0.0
    deadline = changed + PATIENCE
    while run.process.poll() is None and time.monotonic() < deadline:
        if written:
            longest = max(longest, time.monotonic() - changed)
        if status.exists() and (stamp := status.stat().st_mtime_ns) != written:
            written, changed = stamp, time.monotonic()
        if printed.exists() and not told:
            told = time.monotonic()
            run.process.send_signal(signal.SIGUSR1)
        time.sleep(0.05)
    ended = time.monotonic()
    run.ended()
    assert run.summary["status"] == "stopped"
    assert longest < STATUS_SECONDS + REACTION_SECONDS
    assert ended - told < 1.0 + REACTION_SECONDS + 5.0
    assert all(log.stat().st_size >= 100_000_000 for log in run.run_dir.glob("logs/rank-*.log"))
