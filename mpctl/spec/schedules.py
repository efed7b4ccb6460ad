"""The pipeline schedules, one row each; a new schedule needs a row here and nothing else.

A row is all that others need to know of a schedule with one chunk a stage: its name in job files,
how many chunks a stage it runs, how many forwards a stage runs before its first backward, and
whether backward is split in two. The order of actions (model/pipeline/schedule/orders.py), which layouts
are legal (legality.py), the memory and the time of a step, the search and the worker read it. Schedules
in the shape of a V have two chunks a stage and an order of their own (v_shaped.py). Of p
stages and m micro batches a stage s runs its warm-up forwards, then one forward and one backward in
turn, then the rest:

    gpipe        warm-up m                        arXiv 1811.06965
    1f1b         warm-up p - s - 1                PipeDream-flush, arXiv 2104.04473 section 2.2
    interleaved  warm-up 2 (p - s - 1) + (v-1) p  its v chunks, in groups of p micro batches: p | m
    zero-bubble  1f1b with the backward in two    ZB-H1, arXiv 2401.10241

    zbv         no bubble at 1F1B's memory        arXiv 2401.10241 section 6
    v-half      half of 1F1B's activations        arXiv 2405.15362
    v-min       a third of them                   arXiv 2405.15362
    dualpipev   both directions on one copy       DeepSeek's DualPipe, dualpipev.py: m >= 2p

With several chunks on each stage, 1f1b is the interleaved schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

Warmup = Callable[[int, int, int], int]


class PipelineSchedule(NamedTuple):
    """One schedule.

    warmup: forwards of a stage before its first backward, of (stage, stages, micro batches); at
    most the micro batches. Read with one chunk a stage; with several, all have interleaved's.
    chunks: how many chunks a stage it runs; "v": two, of which the second goes back from the last
    stage to the first.
    splits_backward: gradients of inputs first, and those of weights later: with one chunk a stage
    `stage` micro batches later, in a V where its order says.
    microbatches_a_stage: how many micro batches it needs at least for each stage.
    timing: how its length follows from that of its actions, by a formula where one is known
    (plan/estimate/makespan.py); `played` is right for every schedule.
    """

    warmup: Warmup
    chunks: Literal["one", "several", "any", "v"] = "one"
    splits_backward: bool = False
    timing: Literal["gpipe", "1f1b", "played"] = "played"
    microbatches_a_stage: int = 0

    @property
    def is_v(self) -> bool:
        """Whether its virtual stages go forward over the stages and back."""
        return self.chunks == "v"

    def runs(self, chunks: int) -> bool:
        """Whether it runs this number of chunks on each stage."""
        if self.is_v:
            return chunks == 2
        if self.splits_backward and chunks > 1:
            return False
        return self.chunks == "any" or (self.chunks == "several") == (chunks > 1)


def _until_the_first_arrives(stage: int, stages: int, microbatches: int) -> int:
    """Forwards that the stages after this one need before the last can start its backward."""
    return min(stages - stage - 1, microbatches)


def _all(stage: int, stages: int, microbatches: int) -> int:
    return microbatches


SCHEDULES: dict[str, PipelineSchedule] = {
    "1f1b": PipelineSchedule(_until_the_first_arrives, chunks="any", timing="1f1b"),
    "gpipe": PipelineSchedule(_all, timing="gpipe"),
    "interleaved": PipelineSchedule(_until_the_first_arrives, chunks="several"),
    "zero-bubble": PipelineSchedule(_until_the_first_arrives, splits_backward=True),
    "zbv": PipelineSchedule(_all, chunks="v", splits_backward=True),
    "v-half": PipelineSchedule(_all, chunks="v", splits_backward=True),
    "v-min": PipelineSchedule(_all, chunks="v", splits_backward=True),
    "dualpipev": PipelineSchedule(_all, chunks="v", splits_backward=True, microbatches_a_stage=2),
}
