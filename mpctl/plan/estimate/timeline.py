"""A step as a timeline of each stage's actions, from the estimate's seconds and the schedule.

The seconds of a chunk and of a message between stages are those of the step's estimate (time.py),
the order is the schedule's (model/pipeline/schedule/orders.py), and model/pipeline/schedule/replay.py plays
them. A step of very many micro batches is played for as many as PLAYED actions allow; the rest
repeats its middle, so that only its length is computed. Work after the last action (gradients over
dp, the optimizer) is not part of the schedule; the estimate's total includes it.

By hand, 1F1B on 2 stages, F = 1, B = 2, m = 3, no messages: 12 s, each stage idle for 3 of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.pipeline.placement import StageChunk
from mpctl.model.pipeline.schedule.orders import actions
from mpctl.model.pipeline.schedule.replay import Timeline, replay
from mpctl.plan.estimate.communication import transfers
from mpctl.plan.estimate.kernels import MissingFigure
from mpctl.plan.estimate.makespan import PipelineTiming
from mpctl.plan.estimate.network import MissingLink
from mpctl.plan.estimate.time import step_time_model
from mpctl.spec.schedules import SCHEDULES

PLAYED = 200_000
Pair = tuple[StageChunk, StageChunk]


@dataclass(frozen=True)
class StepLine:
    """line: of the first `played` micro batches. seconds: when the last action of all of them ends.
    sent: bytes and seconds of one micro batch's message between neighbouring chunks. is_v: the chunks go
    over the stages and back."""

    line: Timeline
    played: int
    microbatches: int
    seconds: float
    sent: Mapping[Pair, tuple[int, float]]
    is_v: bool = False

    @property
    def skipped(self) -> int:
        """Micro batches that are not played."""
        return self.microbatches - self.played


def find_step_line(layout: JobLayout) -> StepLine | str:
    """The played step, or in words what is missing to time it."""
    try:
        pipeline = step_time_model(layout).pipeline
    except (MissingFigure, MissingLink) as missing:
        return str(missing)
    return play(pipeline, handed_over(layout))


def handed_over(layout: JobLayout) -> dict[Pair, int]:
    """Bytes of one micro batch that each chunk sends to its neighbours."""
    return {(t.sender, t.receiver): sum(t.sizes) for t in transfers(layout)}


def play(pipeline: PipelineTiming, sizes: Mapping[Pair, int], *, limit: int = PLAYED) -> StepLine:
    """Play at most about `limit` actions of the step."""
    p, m, vpp = len(pipeline.chunks), pipeline.microbatches, len(pipeline.chunks[0])
    most = max(limit // (3 * p * vpp) // p, 2) * p  # interleaving takes them in groups of p
    played = min(m, most)
    is_v = SCHEDULES[pipeline.schedule].is_v
    line = replay(
        [actions(pipeline.schedule, stage=stage, stages=p, microbatches=played, chunks=vpp) for stage in range(p)],
        lambda stage, chunk, kind: pipeline.chunks[stage][chunk].of(kind),
        transfer=pipeline.transfer,
        is_v=is_v,
    )
    sent = {pair: (size, pipeline.transfer(*pair)) for pair, size in sizes.items()}
    seconds = line.makespan if played == m else max(pipeline.ends())
    return StepLine(line, played, m, seconds, sent, is_v)
