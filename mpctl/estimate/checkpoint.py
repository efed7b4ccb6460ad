"""How large a checkpoint is and how many of them a run keeps at the same time.

A checkpoint holds of every trained parameter its value and AdamW's two moments, in the dtype that
is stepped (float32, the masters of 16-bit parameters; float64 under fp64), and of a frozen one its
value in its own dtype (checkpoint/reader.py). Every rank of tp writes what it has, so
parameters that are not split over tp are written tp times; what several stages hold is written
once.

By hand, 10 trained bf16 parameters and 5 frozen ones, none split, tp 2: 2 (10 x 12 + 5 x 2) = 260
bytes.
"""

from __future__ import annotations

from math import lcm

from mpctl.layout.job_layout import JobLayout
from mpctl.operators.grad_flow import frozen_by
from mpctl.spec.job import CheckpointSpec


def checkpoint_bytes(layout: JobLayout) -> int:
    """Bytes of all tensors in a checkpoint of this layout; the files' headers and records, some
    hundred bytes a parameter, come on top."""
    width = layout.job.training.value_bytes
    is_frozen = frozen_by(layout.table.freeze)
    trained, seen, total = 3 * max(4, width), set[str](), 0
    for stage in range(len(layout.stages)):
        for weight in layout.stage_parameters(stage):
            if weight.name not in seen:
                seen.add(weight.name)
                each = width if is_frozen(weight.name) else trained
                total += layout.grid.size * weight.local_numel(layout.grid) * each
    return total


def most_at_once(saving: CheckpointSpec, steps: int, *, done: int = 0) -> int:
    """How many checkpoints of the steps from done + 1 to `steps` lie on the disk at once, at most:
    those that are kept, and the one being written before an older one is removed.

    By hand, 100 steps, one saved every 10: 10 with keep_last 0, 3 with keep_last 2, and 6 with
    keep_last 2 and keep_every 20 (20, 40, 60, 80, 90 and the one being written).
    """
    interval = saving.interval
    saves = range(0)
    if interval:
        saves = range(interval * (done // interval + 1), steps + 1, interval)
    ends_apart = saving.at_end and steps not in saves
    return _kept(saves if ends_apart else saves[:-1], saving) + 1


def _kept(saves: range, saving: CheckpointSpec) -> int:
    """How many checkpoints of these steps, multiples of the interval, `shards.prunable` leaves;
    counted without a list, which a job of 10^9 steps would fill the memory with."""
    if saving.keep_last == 0:
        return len(saves)
    older = saves[: -saving.keep_last]
    count = len(saves) - len(older)
    if not (older and saving.keep_every):
        return count
    both = lcm(saves.step, saving.keep_every)
    return count + older[-1] // both - (older[0] - 1) // both
