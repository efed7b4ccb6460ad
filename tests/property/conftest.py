"""Property tests have no deadline of their own: on a busy machine an example may take any time."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("busy-machine", deadline=None)
settings.load_profile("busy-machine")
