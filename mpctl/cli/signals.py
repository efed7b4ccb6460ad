"""Makes signals end a command like an error does, so that half-written files are removed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def ended_by_signals(outcome: str) -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit(128 + number) here; SIGINT raises KeyboardInterrupt as
    always. A SIGHUP that is ignored (nohup) stays so.

    By default Python exits at once on these signals and leaves files half written. outcome: the
    state after the stop, printed on stderr.
    """
    names = (signal.SIGTERM, signal.SIGHUP)
    heeded = [name for name in names if signal.getsignal(name) is not signal.SIG_IGN]
    before = {name: signal.signal(name, _exit) for name in heeded}
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        with suppress(OSError):  # the terminal may be gone
            print(f"stopped: {outcome}", file=sys.stderr, flush=True)
        raise
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
