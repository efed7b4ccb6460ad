"""Every test starts with output as wide as a pipe's, not as the terminal pytest runs in."""

from __future__ import annotations

import os

for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
