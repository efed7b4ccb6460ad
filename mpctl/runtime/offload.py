"""Which inputs that lie in host memory follow each other: those of one forward of one chunk.

By hand, 1f1b with micro batches 0 and 1: the forward of 1 begins before the backward of 0. Taking
the first input of micro batch 1 must not fetch the last one of 0, whose backward is over or has yet
to come.
"""

from __future__ import annotations

from mpctl.layers.recompute import HostOffload
from mpctl.pipeline.schedule.orders import Action
from mpctl.runtime.pass_listener import PassListener


class OffloadPasses(PassListener):
    """Tells an offload where a forward begins."""

    def __init__(self, offload: HostOffload) -> None:
        self.offload = offload

    def begin(self, action: Action) -> None:
        """A new pass, where it is a forward."""
        if action.kind == "forward":
            self.offload.begin_pass()
