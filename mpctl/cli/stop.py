"""Signals that end a command the way an error does, so that what it was writing is cleared away."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_by_signals(outcome: str) -> Iterator[None]:
    """SIGTERM raises SystemExit(143) here; SIGINT raises KeyboardInterrupt as always.

    Python's own reaction to SIGTERM ends the process on the spot and leaves files half written.
    outcome: what a stop means, for a line on stderr.
    """
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        print(f"stopped: {outcome}", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
