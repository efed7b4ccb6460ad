"""Every schedule is a schedule: each pass once, nothing before what it needs, no run that hangs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.model.pipeline.placement import StageChunk
from mpctl.model.pipeline.schedule.orders import (
    FREES,
    Action,
    Kind,
    actions,
    most_in_flight,
    peak_in_flight,
    source,
    target,
)
from mpctl.model.pipeline.schedule.program import Program, Step, programs, transfers
from mpctl.model.pipeline.schedule.replay import Seconds, replay
from mpctl.spec.parallel import ScheduleName
from mpctl.spec.schedules import SCHEDULES


@dataclass(frozen=True)
class Case:
    name: ScheduleName
    stages: int
    microbatches: int
    chunks: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return {"stages": self.stages, "microbatches": self.microbatches, "chunks": self.chunks}

    @cached_property
    def orders(self) -> list[list[Action]]:
        return [list(actions(self.name, stage=s, **self.sizes)) for s in range(self.stages)]

    @cached_property
    def programs(self) -> list[Program]:
        return programs(self.name, **self.sizes)

    @property
    def is_v(self) -> bool:
        return SCHEDULES[self.name].is_v

    def beside(self, stage: int) -> dict[str, int]:
        return {"stage": stage, "stages": self.stages, "chunks": self.chunks, "is_v": self.is_v}

    @property
    def kinds(self) -> tuple[Kind, ...]:
        if self.name == "dualpipev":
            return ("forward", "backward", "backward_input", "backward_weight")
        if SCHEDULES[self.name].splits_backward:
            return ("forward", "backward_input", "backward_weight")
        return ("forward", "backward")


def chunk_counts(name: ScheduleName, stages: int, most: int = 4) -> list[int]:
    return [v for v in range(1, most + 1) if SCHEDULES[name].runs(v) and (v == 1 or stages > 1)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    stages = draw(st.integers(1, 8))
    name = draw(st.sampled_from([n for n in SCHEDULES if chunk_counts(n, stages)]))
    chunks = draw(st.sampled_from(chunk_counts(name, stages)))
    if chunks == 1 or SCHEDULES[name].is_v:
        least = max(1, SCHEDULES[name].microbatches_a_stage * stages)
        return Case(name, stages, draw(st.integers(least, least + 23)), chunks)
    return Case(name, stages, stages * draw(st.integers(1, 4)), chunks)


def some_times(draw: st.DrawFn, case: Case) -> Seconds:
    """Of each stage, chunk and kind its own; whole, so that sums are exact."""
    keys = list(product(range(case.stages), range(case.chunks), case.kinds))
    times = draw(st.lists(st.integers(0, 9), min_size=len(keys), max_size=len(keys)))
    table = dict(zip(keys, times, strict=True))
    return lambda stage, chunk, kind: table[stage, chunk, kind]


@st.composite
def timed_cases(draw: st.DrawFn) -> tuple[Case, Seconds]:
    case = draw(cases())
    return case, some_times(draw, case)


def message(action: Action, chunk: int | None = None) -> tuple[bool, int, int]:
    """What an action hands over, be its backward split or not; chunk: at the other end."""
    return action.kind == "forward", action.microbatch, action.chunk if chunk is None else chunk


# ---------------------------------------------------------------- orders


@given(cases())
def test_each_pass_once_in_its_order_and_those_of_a_chunk_by_micro_batch(case: Case) -> None:
    """So that every schedule sums gradients alike."""
    for order in case.orders:
        at = {action: place for place, action in enumerate(order)}
        assert len(at) == len(order)
        gone = defaultdict[tuple[int, int], list[Kind]](list)
        for action in order:
            gone[action.microbatch, action.chunk].append(action.kind)
        assert sorted(gone) == [*product(range(case.microbatches), range(case.chunks))]
        whole, in_two = ["forward", "backward"], ["forward", "backward_input", "backward_weight"]
        allowed = [whole, in_two] if case.name == "dualpipev" else [[*case.kinds]]
        assert all(kinds in allowed for kinds in gone.values())
        for ends, chunk in product((("forward",), ("backward", "backward_input"), FREES), range(case.chunks)):
            summed = [a.microbatch for a in order if a.kind in ends and a.chunk == chunk]
            assert summed == list(range(case.microbatches))


@given(cases())
def test_source_and_target_are_two_ends_of_a_message(case: Case) -> None:
    sent, taken = set[Any](), set[Any]()
    for stage, order in enumerate(case.orders):
        for action in order:
            to = target(action, **case.beside(stage))
            at = source(action, **case.beside(stage))
            if to is not None:
                sent.add((stage, message(action), to.stage, message(action, to.chunk)))
            if at is not None:
                taken.add((at.stage, message(action, at.chunk), stage, message(action)))
    assert sent == taken
    assert len(sent) == 2 * case.microbatches * (case.stages * case.chunks - 1)
    steps = (0, 1) if case.is_v else (1, case.stages - 1)
    assert all(abs(a - b) in steps for a, _, b, _ in sent)


# ---------------------------------------------------------------- replay


@given(timed_cases(), st.integers(0, 5))
def test_actions_start_when_stage_and_input_are_there(timed: tuple[Case, Seconds], transfer: int) -> None:
    case, seconds = timed
    line = replay(case.orders, seconds, transfer=transfer, is_v=case.is_v)
    done = {
        (stage, *message(action)): end
        for stage, order in enumerate(line.orders)
        for action, end in zip(order, line.ends[stage], strict=True)
        if action.kind != "backward_weight"
    }
    for stage, order in enumerate(case.orders):
        assert list(line.orders[stage]) == order
        free: float = 0
        for action, start, end in zip(order, line.starts[stage], line.ends[stage], strict=True):
            sender = source(action, **case.beside(stage))
            there: float = 0
            if sender is not None:
                there = done[sender.stage, *message(action, sender.chunk)] + transfer * (sender.stage != stage)
            assert start == max(free, there)
            assert end == start + seconds(stage, action.chunk, action.kind)
            free = end
            if action.kind != "forward":
                assert start >= done[stage, *message(action._replace(kind="forward"))]
            if action.kind == "backward_weight":
                assert start >= done[stage, *message(action)]
        assert line.busy[stage] + line.idle[stage] == line.makespan >= line.ends[stage][-1]
    assert line.makespan == max(max(ends) for ends in line.ends)


@given(cases())
def test_peaks_are_those_of_counting(case: Case) -> None:
    counted = [most_in_flight(order) for order in case.orders]
    law = [peak_in_flight(case.name, stage=s, **case.sizes) for s in range(case.stages)]
    assert law == counted == list(replay(case.orders, lambda s, c, k: 1, is_v=case.is_v).in_flight)


# ---------------------------------------------------------------- messages


def made(step: Step) -> tuple[bool, int, int]:
    """The message of a send or receive, as what makes it."""
    assert step.peer is not None
    return message(step.action, None if step.verb == "send" else step.peer.chunk)


def blocking_run(every: Sequence[Program], buffers: int) -> bool:
    """Whether all programs end when a send waits for its receive, or for room in the buffers of
    its direction; each stage receives what its neighbour sends next, whatever that is."""
    at = [0] * len(every)
    sent: dict[tuple[int, int], list[Any]] = defaultdict(list)

    def current(stage: int) -> Step | None:
        return every[stage][at[stage]] if at[stage] < len(every[stage]) else None

    def moves(stage: int, step: Step) -> bool:
        if step.peer is None:
            return True
        peer = step.peer.stage
        if step.verb == "receive":
            return bool(sent[peer, stage]) and sent[peer, stage].pop(0) == made(step)
        other = current(peer)
        if buffers:
            room = len(sent[stage, peer]) < buffers
            sent[stage, peer] += [made(step)] * room
            return room
        waits = other is not None and other.verb == "receive" and other.peer is not None
        if not waits or other is None or other.peer is None or other.peer.stage != stage:
            return False
        assert made(other) == made(step)
        at[peer] += 1
        return True

    moved = True
    while moved:
        moved = False
        for stage in range(len(every)):
            while (step := current(stage)) is not None and moves(stage, step):
                at[stage] += 1
                moved = True
    return all(current(stage) is None for stage in range(len(every))) and not any(sent.values())


@cache
def all_cases(stages: int) -> list[Case]:
    """Of every schedule up to 11 micro batches, and 17; in groups where there are chunks."""
    return [
        Case(name, stages, microbatches, chunks)
        for name in SCHEDULES
        for chunks in chunk_counts(name, stages)
        for microbatches in ((*range(1, 12), 17) if chunks == 1 else (stages, 2 * stages, 3 * stages))
        if microbatches >= SCHEDULES[name].microbatches_a_stage * stages
    ]


STAGES = (1, 2, 3, 4, 5, 8)


@pytest.mark.parametrize("stages", STAGES)
def test_blocking_sends_never_hang(stages: int) -> None:
    """Neither where a send waits for its receive, nor with room for one message."""
    for case in all_cases(stages):
        assert blocking_run(case.programs, 0), case
        assert blocking_run(case.programs, 1), case


def sent_to(place: StageChunk | None, stage: int) -> StageChunk | None:
    """The other end of a message; None where a stage hands over to itself."""
    return None if place is None or place.stage == stage else place


def naive(case: Case) -> list[Program]:
    """Each input received just before its action, each result sent just after."""
    found: list[Program] = []
    for stage, order in enumerate(case.orders):
        steps = []
        for action in order:
            before = sent_to(source(action, **case.beside(stage)), stage)
            after = sent_to(target(action, **case.beside(stage)), stage)
            steps += [Step("receive", action, before)] if before else []
            steps += [Step("compute", action)]
            steps += [Step("send", action, after)] if after else []
        found.append(steps)
    return found


def test_naive_programs_do_hang() -> None:
    """F1 to stage 1 and B0 to stage 0 wait for each other: why programs have an order of sends."""
    case = Case("1f1b", 2, 3)
    assert not blocking_run(naive(case), 0)
    assert blocking_run(naive(case), 1)
    assert not blocking_run(naive(Case("interleaved", 4, 8, 2)), 0)


@pytest.mark.parametrize("stages", STAGES)
def test_both_ends_have_the_same_messages_in_the_same_order(stages: int) -> None:
    """Of both directions and kinds taken together: one queue a pair of stages would do."""
    for case in all_cases(stages):
        shared: dict[tuple[int, int], list[Any]] = defaultdict(list)
        for stage, steps in enumerate(case.programs):
            for step in steps:
                if step.peer is not None:
                    ends = (stage, step.peer.stage)
                    way = ends if step.verb == "send" else ends[::-1]
                    shared[ends].append((way, made(step)))
        assert all(found == shared[there, here] for (here, there), found in shared.items()), case


@pytest.mark.parametrize("stages", STAGES)
def test_messages_are_sent_in_the_order_in_which_they_are_needed(stages: int) -> None:
    """Each direction by the two stages' actions alone, without a program: no message overtakes
    another, so that a queue a direction does, with 2 stages and chunks too. In a V activations and
    gradients go the same way between two stages, each in their order (p2p.py has a link for both)."""
    for case in all_cases(stages):
        sent: dict[tuple[int, int], list[Any]] = defaultdict(list)
        needed: dict[tuple[int, int], list[Any]] = defaultdict(list)
        for stage, steps in enumerate(naive(case)):
            for step in steps:
                if step.peer is not None:
                    is_sent = step.verb == "send"
                    ends = (stage, step.peer.stage) if is_sent else (step.peer.stage, stage)
                    (sent if is_sent else needed)[ends].append(made(step))
        named = {ends: [message(one) for one in made_] for ends, made_ in transfers(case.name, **case.sizes).items()}
        found = [{**each} for each in (sent, needed, named)]
        if case.is_v:
            found = [
                {(e, way): [m for m in ms if m[0] == way] for e, ms in one.items() for way in (True, False)}
                for one in found
            ]
        assert found[0] == found[1] == found[2], case


@given(cases())
def test_programs_are_the_orders_with_inputs_before_and_results_after(case: Case) -> None:
    for stage, (steps, order) in enumerate(zip(case.programs, case.orders, strict=True)):
        assert [step.action for step in steps if step.verb == "compute"] == order
        at = {(step.verb, step.action): place for place, step in enumerate(steps)}
        assert len(at) == len(steps)
        for action in order:
            comes = sent_to(source(action, **case.beside(stage)), stage)
            goes = sent_to(target(action, **case.beside(stage)), stage)
            for verb, peer, way in (("receive", comes, -1), ("send", goes, 1)):
                place = at.get((verb, action))
                assert (place is None) == (peer is None)
                if place is not None:
                    assert steps[place].peer == peer
                    assert way * place > way * at["compute", action]


@given(cases())
def test_few_messages_wait_to_be_used(case: Case) -> None:
    """Buffers that a stage needs beside its activations."""
    for steps in case.programs:
        received = {step.action for step in steps if step.verb == "receive"}
        waiting = most = 0
        for step in steps:
            waiting += step.verb == "receive"
            waiting -= step.verb == "compute" and step.action in received
            most = max(most, waiting)
        assert most <= (2 if case.chunks == 1 else 4)


def asynchronous_run(case: Case, seconds: Seconds, *, shared: bool) -> float:
    """Seconds until all is done when receives and sends are started in the program's order, a
    message passes once both ends have come to it and the one before it in its queue has passed,
    and only an action waits, for its own receive. `shared`: one queue for both directions."""
    every = case.programs
    clock, at = [0.0] * len(every), [0] * len(every)
    posts: dict[tuple[int, Action], tuple[Any, int]] = {}
    queues: dict[Any, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))

    def queue_of(stage: int, step: Step) -> tuple[Any, int]:
        peer = step.peer
        assert peer is not None
        if shared:
            return frozenset((stage, peer.stage)), int(stage > peer.stage)
        way = (stage, peer.stage) if step.verb == "send" else (peer.stage, stage)
        return way, int(step.verb == "send")

    def moves(stage: int, step: Step) -> bool:
        if step.verb != "compute":
            key, side = queue_of(stage, step)
            if step.verb == "receive":
                posts[stage, step.action] = (key, len(queues[key][side]))
            queues[key][side].append(clock[stage])  # never earlier than the one before it
            return True
        if (stage, step.action) in posts:
            key, number = posts[stage, step.action]
            if min(map(len, queues[key])) <= number:
                return False
            clock[stage] = max(clock[stage], *(side[number] for side in queues[key]))
        clock[stage] += seconds(stage, step.action.chunk, step.action.kind)
        return True

    moved = True
    while moved:
        moved = False
        for stage, steps in enumerate(every):
            while at[stage] < len(steps) and moves(stage, steps[at[stage]]):
                at[stage] += 1
                moved = True
    assert at == [len(steps) for steps in every], "it hangs"
    return max(clock)


@given(timed_cases())
def test_an_asynchronous_run_takes_the_replays_time(timed: tuple[Case, Seconds]) -> None:
    case, seconds = timed
    line = replay(case.orders, seconds, is_v=case.is_v)
    assert asynchronous_run(case, seconds, shared=False) == line.makespan
    assert asynchronous_run(case, seconds, shared=True) >= line.makespan
