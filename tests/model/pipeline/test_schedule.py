"""Orders by hand and from the papers' figures, and their closed forms against a replay."""

from __future__ import annotations

import doctest
from itertools import product
from types import ModuleType

import pytest

from mpctl.model.layout.draft import LayoutDraft
from mpctl.model.pipeline.placement import StageChunk
from mpctl.model.pipeline.schedule import orders, program, replay
from mpctl.model.pipeline.schedule.orders import Action, Kind, ScheduleError, actions, show, source, target
from mpctl.model.pipeline.schedule.orders import peak_in_flight as peak
from mpctl.model.pipeline.schedule.program import transfers
from mpctl.model.pipeline.schedule.replay import DeadlockError, Timeline
from mpctl.plan.rules.layout import pipeline_rules
from mpctl.spec.parallel import ScheduleName
from tests.jobs import job_of

SIZES = list(product(range(1, 9), range(1, 20)))  # stages, micro batches
TIMES = [(1, 1, 1), (1, 2, 1), (2, 1, 3), (3, 5, 2), (4, 1, 2), (1, 3, 5)]  # F, B, W


def order(name: ScheduleName, stage: int, stages: int, microbatches: int, chunks: int = 1) -> str:
    return show(actions(name, stage=stage, stages=stages, microbatches=microbatches, chunks=chunks))


def played(
    name: ScheduleName, stages: int, microbatches: int, times: tuple[int, int, int], chunks: int = 1
) -> Timeline:
    """With the same times on every stage and chunk: F, B, and W, which a whole backward has."""
    f, b, w = times
    seconds: dict[Kind, float] = {"forward": f, "backward": b + w, "backward_input": b, "backward_weight": w}
    done = [
        actions(name, stage=stage, stages=stages, microbatches=microbatches, chunks=chunks) for stage in range(stages)
    ]
    return replay.replay(done, lambda stage, chunk, kind: seconds[kind])


@pytest.mark.parametrize("module", [orders, replay, program], ids=lambda module: module.__name__)
def test_the_examples_of_the_docstrings(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def test_gpipe() -> None:
    assert order("gpipe", 0, 3, 3) == order("gpipe", 2, 3, 3) == "F0 F1 F2 B0 B1 B2"


def test_1f1b_is_figure_4_above() -> None:
    """arXiv 2104.04473: 4 devices, 8 micro batches, which the figure counts from 1."""
    assert order("1f1b", 0, 4, 8) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert order("1f1b", 1, 4, 8) == "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7"
    assert order("1f1b", 3, 4, 8) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"


def test_interleaved_by_hand() -> None:
    """2 stages x 2 chunks: warm-up 2 (p - s - 1) + (v - 1) p, which is 4 and 2 forwards."""
    assert order("interleaved", 0, 2, 4, 2) == (
        "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0"
    )
    assert order("interleaved", 1, 2, 4, 2) == (
        "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0"
    )


def test_interleaved_starts_as_figure_4_below() -> None:
    """arXiv 2104.04473: the first of 4 devices, 2 chunks: 1234 of both, 567, then back in turn."""
    assert order("interleaved", 0, 4, 8, 2).startswith(
        "F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 F4.0 F5.0 F6.0 B0.1 F7.0 B1.1 F4.1 B2.1"
    )
    assert order("1f1b", 0, 4, 8, 2) == order("interleaved", 0, 4, 8, 2)


def test_zero_bubble_defers_weights_by_the_stage() -> None:
    assert order("zero-bubble", 0, 3, 4) == "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    assert order("zero-bubble", 1, 3, 4) == "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3"
    assert order("zero-bubble", 2, 3, 4) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"
    assert order("zero-bubble", 2, 3, 1) == "F0 B0 W0"


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_is_p_less_one_passes(name: ScheduleName, times: tuple[int, int, int]) -> None:
    """(p-1)/m of the ideal time, arXiv 2104.04473 section 2.2; every stage has the same."""
    for p, m in SIZES:
        line = played(name, p, m, times)
        assert line.makespan == (m + p - 1) * sum(times)
        assert line.idle == ((p - 1) * sum(times),) * p


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaving_divides_the_bubble_by_v(v: int, times: tuple[int, int, int]) -> None:
    """(p-1)/(v m): p - 1 passes of one chunk, of which a micro batch has v."""
    for p, groups in product(range(2, 9), range(1, 5)):
        line = played("interleaved", p, groups * p, times, v)
        assert line.makespan == (v * groups * p + p - 1) * sum(times)
        assert line.idle == ((p - 1) * sum(times),) * p


@pytest.mark.parametrize("times", list(product(range(1, 4), repeat=3)))
def test_zero_bubbles_bubble(times: tuple[int, int, int]) -> None:
    """(p-1) (F + B - W), arXiv 2401.10241, where W is least and m >= p; and elsewhere."""
    f, b, w = times
    for p, m in SIZES:
        bubble = played("zero-bubble", p, m, times).makespan - m * (f + b + w)
        assert bubble == (p - 1) * (f + b) - (min(m, p) - 1) * min(times)
        if m >= p and w == min(times):
            assert bubble == (p - 1) * (f + b - w)
        assert bubble <= (p - 1) * (f + b)  # against 1f1b's (p-1) (F + B + W)


def test_peaks_are_the_closed_form() -> None:
    """What gpipe, 1f1b and zero-bubble hold: m; min(p - stage, m); min(p, m) everywhere."""
    for p, m in SIZES:
        assert played("gpipe", p, m, (1, 1, 1)).in_flight == (m,) * p
        assert played("1f1b", p, m, (1, 1, 1)).in_flight == tuple(min(p - s, m) for s in range(p))
        assert played("zero-bubble", p, m, (1, 1, 1)).in_flight == (min(p, m),) * p


@pytest.mark.parametrize("v", [2, 3, 4])
def test_peaks_of_interleaving(v: int) -> None:
    """First stage p (1 + (p-1)/(pv)) micro batches, arXiv 2205.05198 section 4.2.3: in chunks
    p v + p - 1, two less with each stage; all m v if they are fewer."""
    for p, groups in product(range(2, 9), range(1, 5)):
        line = played("interleaved", p, groups * p, (1, 1, 1), v)
        law = [min(p * v + p - 1 - 2 * stage, groups * p * v) for stage in range(p)]
        assert list(line.in_flight) == law
        sizes = {"stages": p, "microbatches": groups * p, "chunks": v}
        assert [peak("interleaved", stage=stage, **sizes) for stage in range(p)] == law


def test_unequal_times_and_transfers_by_hand() -> None:
    """2 stages, 2 micro batches; forwards 1 and 3, backwards 2 and 6, half a second between.

    stage 0: F0 0-1, F1 1-2, B0 11-13, B1 20-22; stage 1: F0 1.5-4.5, B0 4.5-10.5, F1 10.5-13.5,
    B1 13.5-19.5, since B0 reaches stage 0 at 11 and B1 at 20."""
    seconds = {(0, "forward"): 1, (1, "forward"): 3, (0, "backward"): 2, (1, "backward"): 6}
    done = [actions("1f1b", stage=stage, stages=2, microbatches=2) for stage in range(2)]
    line = replay.replay(done, lambda stage, chunk, kind: seconds[stage, kind], transfer=0.5)
    assert line.starts == ((0, 1, 11, 20), (1.5, 4.5, 10.5, 13.5))
    assert line.ends == ((1, 2, 13, 22), (4.5, 10.5, 13.5, 19.5))
    assert line.makespan == 22
    assert line.busy == (6, 18)
    assert line.idle == (16, 4)
    assert line.in_flight == (2, 1)


def test_chunks_have_their_own_times() -> None:
    """One micro batch meets every virtual stage once each way, the head's among them."""
    asked = []

    def seconds(stage: int, chunk: int, kind: Kind) -> float:
        asked.append((stage, chunk, kind))
        return 10 ** (2 * chunk + stage) * (1 if kind == "forward" else 2)

    done = [actions("interleaved", stage=stage, stages=2, microbatches=2, chunks=2) for stage in range(2)]
    line = replay.replay(done, seconds)
    assert line.busy == (2 * 3 * 101, 2 * 3 * 1010)
    assert line.ends[1][line.orders[1].index(Action("forward", 0, 1))] == 1111
    assert sorted(asked) == sorted(product(range(2), range(2), ("forward", "backward")))


def f(microbatch: int) -> Action:
    return Action("forward", microbatch)


def b(microbatch: int) -> Action:
    return Action("backward", microbatch)


def w(microbatch: int) -> Action:
    return Action("backward_weight", microbatch)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([[b(0), f(0)]], "stage 0 waits at B0"),
        ([[f(0), b(0), f(1), b(1)], [f(1), b(1), f(0), b(0)]], "0 waits at B0, .* 1 waits at F1"),
        ([[f(0), b(0)], [b(0)]], "stage 0 waits at B0, stage 1 waits at B0"),
        ([[f(0), w(0), f(1)]], "stage 0 waits at W0"),
    ],
    ids=["backward first", "crossed", "a forward missing", "weights first"],
)
def test_a_schedule_that_cannot_be_run_is_refused(stages: list[list[Action]], message: str) -> None:
    with pytest.raises(DeadlockError, match=message):
        replay.replay(stages, lambda stage, chunk, kind: 1)


def test_serial_orders_can_be_run() -> None:
    line = replay.replay([[f(0), b(0), f(1), b(1)]] * 2, lambda stage, chunk, kind: 1)
    assert line.makespan == 8


def test_where_results_go() -> None:
    """3 stages x 2 chunks: a forward leaves the last stage for the next chunk of the first."""
    sizes = {"stages": 3, "chunks": 2}
    last, first = Action("forward", 0, 0), Action("backward", 0, 1)
    assert target(last, stage=2, **sizes) == StageChunk(0, 1)
    assert target(first, stage=0, **sizes) == StageChunk(2, 0)
    assert source(first, stage=0, **sizes) == StageChunk(1, 1)
    assert source(last, stage=0, **sizes) is None  # the batch
    assert target(first._replace(chunk=0), stage=0, **sizes) is None
    assert source(first, stage=2, **sizes) is None  # the loss
    assert target(last._replace(chunk=1), stage=2, **sizes) is None
    weight = Action("backward_weight", 0)
    assert source(weight, stage=1, stages=3) is target(weight, stage=1, stages=3) is None


def test_every_virtual_stage_but_the_last_sends_each_micro_batch_on_and_back() -> None:
    found = transfers("interleaved", stages=4, microbatches=8, chunks=3)
    assert {pair: len(sent) for pair, sent in found.items()} == {
        **{(s, s + 1): 3 * 8 for s in range(3)},
        (3, 0): 2 * 8,
        **{(s + 1, s): 3 * 8 for s in range(3)},
        (0, 3): 2 * 8,
    }
    assert show(transfers("1f1b", stages=2, microbatches=3)[0, 1]) == "F0 F1 F2"
    wrapped = transfers("interleaved", stages=2, microbatches=2, chunks=2)  # both kinds, both ways
    assert show(wrapped[0, 1]) == "F0.0 F1.0 F0.1 F1.1 B0.1 B1.1"
    assert show(wrapped[1, 0]) == "F0.0 F1.0 B0.1 B1.1 B0.0 B1.0"


REFUSED = {"vpp-needs-pp", "microbatches-fill-pipeline", "schedule-vpp"}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_the_rules_of_a_job_refuse_what_has_no_schedule(name: ScheduleName) -> None:
    for p, v, m in product((1, 2, 4), (1, 2), (4, 6)):
        job = job_of(
            {
                "parallel.schedule": name,
                "parallel.pp": p,
                "parallel.vpp": v,
                "training.global_batch_size": m,
                "training.micro_batch_size": 1,
            }
        )
        checks = pipeline_rules(LayoutDraft(job))
        broken = {check.rule for check in checks if check.status == "error"} & REFUSED
        try:
            list(actions(name, stage=0, stages=p, microbatches=m, chunks=v))
        except ScheduleError as error:
            assert broken, (p, v, m, str(error))
        else:
            assert not broken, (p, v, m)
