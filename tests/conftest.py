"""What every test starts from: output as wide as a pipe's, not as the terminal that pytest runs in."""

from __future__ import annotations

import os

for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
