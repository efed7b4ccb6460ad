"""Schedules in the shape of a V: idle times, peaks and orders as those of the code that defines them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from mpctl.core.errors import InputError
from mpctl.model.pipeline.placement import StageChunk, StagePlacement
from mpctl.model.pipeline.schedule.legality import schedule_conflicts
from mpctl.model.pipeline.schedule.orders import Action, Kind, actions, peak_in_flight
from mpctl.model.pipeline.schedule.replay import replay
from mpctl.model.pipeline.schedule.v_shaped import v_order
from mpctl.model.pipeline.stages import stage_layers
from mpctl.plan.estimate.makespan import ChunkTimes, PipelineTiming
from mpctl.plan.planning.plan import load_plan

NAMES = ("zbv", "v-half", "v-min", "dualpipev")
EQUAL: dict[Kind, float] = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}
UNEQUAL: dict[Kind, float] = {"forward": 1, "backward": 2, "backward_input": 1.2, "backward_weight": 0.8}


def orders(name: str, p: int, m: int) -> list[list[Action]]:
    return [list(actions(name, stage=stage, stages=p, microbatches=m, chunks=2)) for stage in range(p)]


def makespan(name: str, p: int, m: int, seconds: dict[Kind, float] = EQUAL) -> float:
    return replay(orders(name, p, m), lambda stage, chunk, kind: seconds[kind], is_v=True).makespan


@pytest.mark.parametrize(
    ("name", "p", "m", "idle"),
    [
        *(("zbv", p, m, p - 1) for p, m in ((4, 8), (8, 16), (8, 64))),
        *(("dualpipev", p, m, p - 1) for p, m in ((4, 8), (8, 16), (8, 64))),
        *(("v-half", p, m, idle) for p, m, idle in ((4, 8, 5), (8, 16, 17), (8, 64, 17))),
        *(("v-min", p, m, idle) for p, m, idle in ((4, 8, 11), (8, 16, 27), (8, 64, 27))),
    ],
)
def test_a_stage_is_idle_as_long_as_published(name: str, p: int, m: int, idle: int) -> None:
    """Each chunk's F, I and W take 1, so that a stage works 6 m. DualPipeV hands on what each half of a
    pair of a forward and a backward made; handed on together after both it is idle for 2 (p - 1)."""
    assert makespan(name, p, m) == 6 * m + idle


def test_unequal_parts() -> None:
    """p 8, m 32, F 1, I 1.2, W 0.8: v-min is slower than 1F1B's 234."""
    found = {name: round(makespan(name, 8, 32, UNEQUAL), 1) for name in NAMES}
    assert found == {"zbv": 200.4, "v-half": 215.0, "v-min": 258.6, "dualpipev": 202.2}


def pairs_at_once(p: int, m: int) -> float:
    """The makespan of DualPipeV where the two halves of a pair begin and end together."""
    units = []
    for stage in range(p):
        work, own = list(v_order("dualpipev", stage=stage, stages=p, microbatches=m)), []
        while work:
            other = {"aF": "bB", "bF": "aB"}.get(work[0][0])
            first_of_last = stage == p - 1 and not any(len(unit) == 2 for unit in own) and work[1:2] == [("bB", 0)]
            is_pair = len(work) > 1 and work[1][0] == other and not first_of_last
            own.append([work.pop(0) for _ in range(1 + is_pair)])
        units.append(own)
    done: dict[tuple[bool, int, int], float] = {}
    clock, lengths = [0.0] * p, {"F": 1, "I": 1, "W": 1, "B": 2}

    def needs(stage: int, piece: str, number: int) -> tuple[bool, int, int] | None:
        virtual = stage if piece[0] == "a" else 2 * p - 1 - stage
        if piece[1] == "F":
            return (True, virtual - 1, number) if virtual else None
        if piece[1] == "W":
            return (False, virtual, number)
        return (True, virtual, number) if virtual == 2 * p - 1 else (False, virtual + 1, number)

    while any(units):
        for stage, own in enumerate(units):
            while own:
                wanted = [need for work in own[0] if (need := needs(stage, *work)) is not None]
                if any(need not in done for need in wanted):
                    break
                start = max([clock[stage], *(done[need] for need in wanted)])
                clock[stage] = start + sum(lengths[piece[1]] for piece, _ in own[0])
                for piece, number in own.pop(0):
                    if piece[1] != "W":
                        virtual = stage if piece[0] == "a" else 2 * p - 1 - stage
                        done[piece[1] == "F", virtual, number] = clock[stage]
    return max(clock)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 16)])
def test_pairs_of_dualpipev_as_one_piece(p: int, m: int) -> None:
    assert pairs_at_once(p, m) == 6 * m + 2 * (p - 1)


@pytest.mark.parametrize(
    ("name", "p4", "p8"),
    [
        ("zbv", [8] * 4, [16] * 8),
        ("dualpipev", [9] * 4, [17] * 8),
        ("v-half", [6] * 4, [10] * 8),
        ("v-min", [4] * 4, [7] + [8] * 7),
    ],
)
def test_peaks(name: str, p4: list[int], p8: list[int]) -> None:
    """In chunks: 2p, 2p + 1, (p + 2) / 2 and (p + 4) / 3 micro batches of a whole stage."""
    for p, m, peaks in ((4, 8, p4), (8, 16, p8), (8, 64, p8)):
        assert [peak_in_flight(name, stage=s, stages=p, microbatches=m, chunks=2) for s in range(p)] == peaks


def spelled(name: str, stage: int) -> str:
    return " ".join(f"{piece}{n}" for piece, n in v_order(name, stage=stage, stages=4, microbatches=8))


def listed(text: str) -> str:
    """`bFIW0` as bF0 bI0 bW0, `aF0-2` as aF0 aF1 aF2."""
    found: list[str] = []
    for word in text.split():
        kinds, numbers = word[1:].rstrip("0123456789-"), word.lstrip("abFIWB")
        first, _, last = numbers.partition("-")
        found += [f"{word[0]}{kind}{n}" for n in range(int(first), int(last or first) + 1) for kind in kinds]
    return " ".join(found)


@pytest.mark.parametrize(
    ("name", "stage", "order"),
    [
        ("zbv", 0, "aF0-6 bFIW0 bFIW1 bFIW2 bFIW3 aF7 aIW0 bFIW4 aIW1 bFIW5 aIW2 bFIW6 aIW3 bFIW7 aIW4 aIW5 aIW6 aIW7"),
        (
            "zbv",
            3,
            "aF0 bF0 aF1 bF1 aF2 bF2 aF3 bF3 bIW0 aF4 aIW0 bF4 bIW1 aF5 aIW1 bF5 bIW2 aF6 aIW2 bF6 bIW3 aF7 aIW3 bF7 "
            "bIW4 aI4 bI5 aI5 bI6 aI6 bI7 aI7 aW4 bW5 bW6 bW7 aW5 aW6 aW7",
        ),
        (
            "dualpipev",
            0,
            "aF0-6 bF0 bIW0 bF1 bIW1 bF2 bIW2 bF3 aF7 bB3 bF4 aB0 bB4 bF5 aB1 bB5 bF6 aB2 bB6 bF7 aB3 bB7 aI4 aW4 aI5 "
            "aW5 aI6 aW6 aI7 aW7",
        ),
        (
            "dualpipev",
            3,
            "aF0 bF0 aF1 bF1 aF2 bF2 aF3 bF3 aF4 bB0 bF4 aB0 aF5 bB1 bF5 aB1 aF6 bB2 bF6 aB2 aF7 bB3 bF7 aB3 bB4 aB4 "
            "bB5 aB5 bI6 aI6 bI7 aI7 bW6 aW6 bW7 aW7",
        ),
        (
            "v-min",
            0,
            "aF0-2 bFIW0 bFIW1 aIW0 "
            + " ".join(f"aF{k} bF{k - 1} bI{k - 1} aI{k - 2} bW{k - 1} aW{k - 2}" for k in range(3, 8))
            + " bF7 bI7 aI6 bW7 aW6 aI7 aW7",
        ),
        (
            "v-half",
            3,
            "aF0 bF0 aF1 bF1 aF2 bF2 bI0 bW0 aI0 aW0 aF3 bF3 bI1 bW1 aI1 aW1 aF4 bF4 bI2 bW2 aI2 aW2 aF5 bF5 bI3 bW3 "
            "aI3 aF6 aW3 bF6 bI4 aI4 bW4 aF7 aW4 bF7 bI5 aI5 bI6 aI6 bW5 bW6 bI7 aI7 bW7 aW5 aW6 aW7",
        ),
    ],
)
def test_orders_of_four_stages_and_eight_micro_batches(name: str, stage: int, order: str) -> None:
    assert spelled(name, stage) == listed(order)


@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_more_micro_batches_repeat_the_middle(name: str) -> None:
    """Each micro batch beyond those that are arranged adds six pieces and six seconds."""
    for p in (2, 3, 5):
        lengths = [makespan(name, p, m) for m in (4 * p, 4 * p + 1, 7 * p)]
        assert lengths[1] == lengths[0] + 6 and lengths[2] == lengths[0] + 6 * 3 * p


def test_the_first_stage_has_both_ends_and_the_last_one_the_middle() -> None:
    v = StagePlacement(stages=4, chunks=2, is_v=True)
    assert [v.place(virtual) for virtual in (0, 3, 4, 7)] == [(0, 0), (3, 0), (3, 1), (0, 1)]
    assert all(v.virtual(v.place(virtual)) == virtual for virtual in range(8))
    assert v.last == (0, 1) and v.neighbour(StageChunk(3, 0), 1) == (3, 1) and v.neighbour(v.last, 1) is None
    assert stage_layers(8, pp=2, vpp=2, is_v=True) == [[(0, 2), (6, 8)], [(2, 4), (4, 6)]]
    assert stage_layers(10, pp=2, vpp=2, first=4, is_v=True) == [[(0, 2), (8, 10)], [(2, 5), (5, 8)]]


@pytest.mark.parametrize(
    ("name", "numbers", "rules"),
    [
        ("zbv", (4, 3, 2), []),
        ("v-min", (4, 1, 2), []),
        ("dualpipev", (4, 8, 2), []),
        ("dualpipev", (4, 7, 2), ["microbatches-fill-pipeline"]),
        ("zbv", (4, 8, 1), ["schedule-vpp"]),
        ("dualpipev", (4, 7, 4), ["schedule-vpp", "microbatches-fill-pipeline"]),
    ],
)
def test_conflicts(name: str, numbers: tuple[int, int, int], rules: Iterable[str]) -> None:
    stages, microbatches, chunks = numbers
    found = schedule_conflicts(name, stages=stages, microbatches=microbatches, chunks=chunks)
    assert [conflict.rule for conflict in found] == rules


@pytest.mark.parametrize("name", NAMES)
def test_a_long_step_is_as_long_as_if_every_action_were_played(name: str) -> None:
    """With messages, unequal parts, and a head on stage 0."""
    chunks = [[ChunkTimes(1.0, 1.2, 0.8)] * 2 for _ in range(4)]
    chunks[0] = [chunks[0][0], ChunkTimes(1.3, 1.5, 1.0)]
    ahead = [0.05, 0.05, 0.05, 0.0, 0.05, 0.05, 0.05]
    timing = PipelineTiming(name, chunks, ahead, ahead, 80)
    line = replay(orders(name, 4, 80), lambda s, c, kind: chunks[s][c].of(kind), transfer=timing.transfer, is_v=True)
    assert max(timing.ends()) == pytest.approx(line.makespan, rel=2e-3)


def test_a_plan_of_a_v_by_hand() -> None:
    """4 stages, 8 micro batches: the ends send one way for each, the last stage nothing to itself; the tied
    word table is on stage 0 alone."""
    of_v = {"parallel.schedule": "zbv", "parallel.vpp": 2}
    plan = load_plan("two-nodes-16-gpus", of_v)
    assert plan.stages is not None and plan.estimate is not None
    assert plan.stages[0] == ((0, 3), (21, 24)) and plan.stages[3] == ((9, 12), (12, 15))
    sent = [sum(m.count for m in own if m.axis == "pp" and m.kind == "send") for own in plan.estimate.messages]
    assert sent == [16, 32, 32, 16]
    half = load_plan("two-nodes-16-gpus", {**of_v, "parallel.schedule": "v-half"}).estimate
    assert half is not None
    assert half.memory[0].activation_bytes < 0.8 * plan.estimate.memory[0].activation_bytes
    with pytest.raises(InputError, match="zbv cannot run with 1 chunk a stage"):
        load_plan("two-nodes-16-gpus", {"parallel.schedule": "zbv"})
