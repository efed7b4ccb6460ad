"""Ends of stages without playing every micro batch, against the replay of every action."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mpctl.model.pipeline.placement import StageChunk
from mpctl.model.pipeline.schedule.orders import actions
from mpctl.model.pipeline.schedule.replay import replay
from mpctl.plan.estimate.makespan import ChunkTimes, PipelineTiming
from mpctl.spec.parallel import ScheduleName

SECONDS = st.floats(0.5, 2.0)


def played(pipeline: PipelineTiming) -> list[float]:
    """Every action."""
    p, vpp, m = len(pipeline.chunks), len(pipeline.chunks[0]), pipeline.microbatches
    orders = [actions(pipeline.schedule, stage=s, stages=p, microbatches=m, chunks=vpp) for s in range(p)]

    def transfer(sender: StageChunk, receiver: StageChunk) -> float:
        a, b = (place.chunk * p + place.stage for place in (sender, receiver))
        return pipeline.ahead[a] if a < b else pipeline.back[b]

    line = replay(orders, lambda s, c, kind: pipeline.chunks[s][c].of(kind), transfer=transfer)
    return [ends[-1] for ends in line.ends]


def unequal(draw: st.DrawFn, schedule: ScheduleName, vpp: int, times: int) -> PipelineTiming:
    p = draw(st.sampled_from([2, 3, 4, 8]))
    m = draw(st.integers(1, 6)) * p * times if vpp > 1 else draw(st.integers(1, 60))
    chunks = [[ChunkTimes(draw(SECONDS), draw(SECONDS), draw(SECONDS)) for _ in range(vpp)] for _ in range(p)]
    hops = p * vpp - 1
    ahead, back = (draw(st.lists(st.floats(0, 0.5), min_size=hops, max_size=hops)) for _ in range(2))
    return PipelineTiming(schedule, chunks, ahead, back, m)


@st.composite
def exact(draw: st.DrawFn) -> PipelineTiming:
    return unequal(draw, draw(st.sampled_from(["1f1b", "gpipe"])), 1, 1)


@st.composite
def extrapolated(draw: st.DrawFn) -> PipelineTiming:
    kinds: list[tuple[ScheduleName, int]] = [("interleaved", 2), ("zero-bubble", 1)]
    return unequal(draw, *draw(st.sampled_from(kinds)), 1)


@settings(max_examples=50)
@given(exact())
def test_1f1b_and_gpipe_end_as_if_played(pipeline: PipelineTiming) -> None:
    for end, expected in zip(pipeline.ends(), played(pipeline), strict=True):
        assert abs(end - expected) < 1e-9 * expected


@settings(max_examples=50)
@given(extrapolated())
def test_the_rest_ends_nearly_so(pipeline: PipelineTiming) -> None:
    """Stages up to four times as slow as others, messages up to half an action: a tenth."""
    assert abs(max(pipeline.ends()) / max(played(pipeline)) - 1) < 0.1


def test_chunks_of_like_stages_are_within_two_percent() -> None:
    """What layouts are like: an end a fifth slower, messages a twentieth of an action."""
    chunks = [[ChunkTimes(1.0, 1.0, 1.0)] * 3 for _ in range(8)]
    chunks[-1] = [chunks[0][0], chunks[0][0], ChunkTimes(1.2, 1.2, 1.2)]
    for m in (8, 64, 256):
        pipeline = PipelineTiming("interleaved", chunks, [0.05] * 23, [0.05] * 23, m)
        assert abs(max(pipeline.ends()) / max(played(pipeline)) - 1) < 0.02


def test_64_stages_and_512_micro_batches_by_hand() -> None:
    """Equal stages, no messages: (m + p - 1) (F + B)."""
    chunks = [[ChunkTimes(1.0, 1.0, 1.0)]] * 64
    assert max(PipelineTiming("1f1b", chunks, [0] * 63, [0] * 63, 512).ends()) == (512 + 63) * 3
