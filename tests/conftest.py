"""What every test starts from, however pytest was started.

Output is as wide as a pipe's, not as the terminal that pytest runs in. SIGINT interrupts and SIGHUP
ends: a shell that starts pytest in the background, and nohup, have them ignored, and commands
started by tests inherit that.
Property tests have no deadline of their own: on a busy machine an example may take any time. Triton
is imported before torch's compiler would do so, to be interpreted where there is no GPU.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
from hypothesis import settings

from tests.interpreted import import_triton

import_triton()
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
settings.register_profile("busy-machine", deadline=None)
settings.load_profile("busy-machine")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`@pytest.mark.quick(n)`: the first n cases run in `make test`, all in `make test-all`. Cases that are
    slow themselves do not count."""
    seen = Counter[str]()
    for item in items:
        mark = item.get_closest_marker("quick")
        if mark and not item.get_closest_marker("slow"):
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if seen[test] > mark.args[0]:
                item.add_marker(pytest.mark.slow)
