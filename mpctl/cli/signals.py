"""Signals that end a command as an error does, so that half-written files are removed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_by_signals(outcome: str) -> Iterator[None]:
    """SIGTERM raises SystemExit(143) here; SIGINT raises KeyboardInterrupt as always.

    By default Python ends at SIGTERM at once and leaves files half written. outcome: the state that
    a stop leaves, for a line on stderr.
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
