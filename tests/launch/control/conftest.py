from __future__ import annotations

from tests.launch.control.peers import server

__all__ = ["server"]
