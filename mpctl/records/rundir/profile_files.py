"""RUN/profile/rank-N.jsonl: the times of a rank's work, one JSON object a line for each profiled
step.

`mpctl launch --profile 5-7` has every rank write them (train/runtime/profile.py), `mpctl bench trace`
reads them (measure/bench/trace.py). A step that a later attempt repeats is there twice; the last line
counts.

Times are seconds of the monotonic clock of the rank's host (Python's perf_counter), which all
processes of a host share, but not hosts. On CUDA they are when the stream reached a place.

By hand, a forward of micro batch 0 from 12.0 to 12.5 s in which the rank waits from 12.1 to 12.2 s
for an all-reduce that it began to start at 12.05 s:

    {"name": "forward", "began": 12.0, "ended": 12.5, "microbatch": 0, "chunk": 0}
    {"name": "all_reduce", "phase": "start", "axis": "tp", ..., "began": 12.05, "ended": 12.06}
    {"name": "all_reduce", "phase": "wait", ..., "began": 12.1, "ended": 12.2, "started": 12.05}
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

PROFILE = "profile"
WORK = (
    "step",
    "data",
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "gradients",
    "norm",
    "optimizer",
    "status",
    "validation",
    "checkpoint",
)
"""Names of events that are not collectives. step: the complete update; data: reading a micro batch;
gradients: what is left of their sums after the schedule; norm: of all gradients; status: what all
ranks exchange once a step; checkpoint: how long training waits for saving."""


class RequiredEventFields(TypedDict):
    """Fields of every event: its name, one of WORK or the kind of a collective, and its times."""

    name: str
    began: float
    ended: float


class ProfileEvent(RequiredEventFields, total=False):
    """A piece of work, or a part of a collective.

    microbatch, chunk: of a pass, or of the pass during which a collective was started, which is
    then `of` ("forward"); phase: "start" while the rank starts a collective, "wait" while it waits
    for one, which it began to start at `started`; axis, bytes, dtype: of a collective
    (train/transport/timing.py); peer: the stage at the other end of a message between stages.
    """

    microbatch: int
    chunk: int
    of: str
    phase: Literal["start", "wait"]
    started: float
    axis: str
    bytes: int
    dtype: str
    peer: int


class ProfiledStep(TypedDict):
    """One line: a step, and what follows it until the next begins. clock: the same for all ranks
    whose times are of one clock; coords: of the rank, by axis; world_size: ranks of the run."""

    rank: int
    world_size: int
    coords: dict[str, int]
    host: str
    clock: str
    step: int
    events: list[ProfileEvent]


def profile_path(run: Path, rank: int) -> Path:
    return run / PROFILE / f"rank-{rank}.jsonl"
