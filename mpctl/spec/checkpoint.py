"""When checkpoints are saved, and how many of them stay."""

from __future__ import annotations

from pydantic import Field

from mpctl.spec.base import CountOrZero, StrictModel


class CheckpointSpec(StrictModel):
    """When checkpoints are saved, and how many of them stay in the run directory."""

    interval: CountOrZero = Field(
        0, description="steps between checkpoints; 0 saves only at the end and on a stop"
    )
    at_end: bool = Field(True, description="save a checkpoint after the last step")
    keep_last: CountOrZero = Field(
        0, description="newest checkpoints to keep: older ones are removed; 0 keeps all"
    )
    keep_every: CountOrZero = Field(
        0,
        description="besides keep_last, keep each checkpoint whose step is a multiple of this; "
        "0: no others",
    )
    asynchronous: bool = Field(
        True,
        description="training waits only for a copy to host memory, which a thread writes; false: "
        "until the checkpoint is on the disk",
    )
