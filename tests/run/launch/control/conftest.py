from __future__ import annotations

from tests.run.launch.control.peers import server

__all__ = ["server"]
