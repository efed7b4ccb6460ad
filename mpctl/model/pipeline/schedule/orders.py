"""The order in which a pipeline stage runs forwards and backwards of micro batches and chunks.

The schedules and their warm-up (forwards before the first backward) are a table, spec/schedules.py.
Which virtual stage a chunk is, placement.py says. Where a schedule of one chunk a stage splits
backward, the weight gradients of micro batch j follow the input gradients of micro batch j + s. A
stage holds the activations of at most warm-up + 1 chunks, and of s more where backward is split.
Schedules in the shape of a V are listed piece by piece (v_shaped.py).
Under every schedule the backwards of a chunk run in the order of micro batches, so that gradients
are summed in the same order.

>>> show(actions("1f1b", stage=0, stages=2, microbatches=3))
'F0 F1 B0 F2 B1 B2'
>>> show(actions("1f1b", stage=1, stages=2, microbatches=3))
'F0 B0 F1 B1 F2 B2'
>>> show(actions("zero-bubble", stage=1, stages=2, microbatches=3))
'F0 B0 F1 B1 W0 F2 B2 W1 W2'
>>> show(actions("interleaved", stage=1, stages=2, microbatches=2, chunks=2))
'F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0'
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice, takewhile
from typing import Literal, NamedTuple

from mpctl.model.pipeline.placement import StageChunk, StagePlacement
from mpctl.model.pipeline.schedule.legality import schedule_conflicts
from mpctl.model.pipeline.schedule.v_shaped import v_order
from mpctl.spec.parallel import ScheduleName
from mpctl.spec.schedules import SCHEDULES

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]

LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "backward_input": "B", "backward_weight": "W"}
# The direction in which a result goes along the virtual stages; a weight gradient stays.
DIRECTIONS: dict[Kind, int] = {"forward": 1, "backward": -1, "backward_input": -1}
PIECES: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
"""The kinds of a V's pieces of work (v_shaped.py)."""
FREES: frozenset[Kind] = frozenset({"backward", "backward_weight"})

FEW_OF_V = 4
"""Micro batches for each stage after which a V holds no more than before."""


class ScheduleError(ValueError):
    """The schedule is not possible with these numbers (legality.py); a job's rules refuse it."""


class Action(NamedTuple):
    """One piece of work of a stage: a forward or backward of one chunk on one micro batch."""

    kind: Kind
    microbatch: int
    chunk: int = 0


def show(order: Iterable[Action]) -> str:
    """Actions as text: `F0 B0 W0`, or `F0.1 B0.1` (micro batch.chunk) with several chunks.

    F forward, B backward (or its input gradients), W weight gradients.
    """
    done = list(order)
    many = any(action.chunk for action in done)
    return " ".join(f"{LETTERS[kind]}{microbatch}" + (f".{chunk}" if many else "") for kind, microbatch, chunk in done)


def actions(name: ScheduleName, *, stage: int, stages: int, microbatches: int, chunks: int = 1) -> Iterator[Action]:
    """The actions of `stage` in one step, in order; raises ScheduleError."""
    ahead = warmup(name, stage=stage, stages=stages, microbatches=microbatches, chunks=chunks)
    if SCHEDULES[name].is_v:
        return _of_v(name, stage, stages, microbatches)
    splits = SCHEDULES[name].splits_backward
    last_first = range(chunks - 1, -1, -1)
    order = _in_turn(
        _passes("forward", range(chunks), stages, microbatches),
        _passes("backward_input" if splits else "backward", last_first, stages, microbatches),
        ahead,
    )
    return _with_weights(order, stage, microbatches) if splits else order


def warmup(name: ScheduleName, *, stage: int, stages: int, microbatches: int, chunks: int = 1) -> int:
    """Number of forwards that a stage runs before it alternates forward and backward.

    Raises ScheduleError.
    """
    for conflict in schedule_conflicts(name, stages=stages, microbatches=microbatches, chunks=chunks):
        raise ScheduleError(conflict.message)
    assert 0 <= stage < stages, f"stage {stage} of {stages}"
    if SCHEDULES[name].is_v:
        return _counts_of_v(name, stage, stages, min(microbatches, FEW_OF_V * stages))[0]
    if chunks == 1:
        return SCHEDULES[name].warmup(stage, stages, microbatches)
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages, microbatches * chunks)


def peak_in_flight(name: ScheduleName, *, stage: int, stages: int, microbatches: int, chunks: int = 1) -> int:
    """The most activations of one micro batch in one chunk that a stage holds at once.

    Divided by `chunks` it is a number of micro batches of the whole stage. On the first stage of an
    interleaved schedule that is p (1 + (p-1)/(p v)), arXiv 2205.05198 section 4.2.3, and 2/v less
    on each further stage.
    """
    ahead = warmup(name, stage=stage, stages=stages, microbatches=microbatches, chunks=chunks)
    if SCHEDULES[name].is_v:
        return _counts_of_v(name, stage, stages, min(microbatches, FEW_OF_V * stages))[1]
    deferred = stage if SCHEDULES[name].splits_backward else 0
    return min(ahead + 1 + deferred, microbatches * chunks)


def most_in_flight(order: Iterable[Action]) -> int:
    """`peak_in_flight` of these actions, by counting.

    Activations are held from a forward to the backward, or weight gradients, that frees them.
    """
    saved = peak = 0
    for kind, _, _ in order:
        if kind == "forward":
            saved += 1
            peak = max(peak, saved)
        elif kind in FREES:
            saved -= 1
    return peak


def source(action: Action, *, stage: int, stages: int, chunks: int = 1, is_v: bool = False) -> StageChunk | None:
    """The chunk whose result an action needs: as a message if it is on another stage; None if it
    needs none."""
    return _neighbour(action, stage, StagePlacement(stages, chunks, is_v), -1)


def target(action: Action, *, stage: int, stages: int, chunks: int = 1, is_v: bool = False) -> StageChunk | None:
    """The chunk that needs an action's result, which is sent if it is on another stage; None if
    none does."""
    return _neighbour(action, stage, StagePlacement(stages, chunks, is_v), 1)


def _neighbour(action: Action, stage: int, placement: StagePlacement, way: int) -> StageChunk | None:
    if action.kind not in DIRECTIONS:
        return None
    return placement.neighbour(StageChunk(stage, action.chunk), way * DIRECTIONS[action.kind])


@lru_cache(maxsize=4096)  # a search asks for a stage in each layout that has it
def _counts_of_v(name: ScheduleName, stage: int, stages: int, microbatches: int) -> tuple[int, int]:
    """`warmup` and `peak_in_flight` of a V-shaped schedule, by counting."""
    order = list(_of_v(name, stage, stages, microbatches))
    return sum(1 for _ in takewhile(lambda action: action.kind == "forward", order)), most_in_flight(order)


def _of_v(name: ScheduleName, stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    for piece, microbatch in v_order(name, stage=stage, stages=stages, microbatches=microbatches):
        yield Action(PIECES[piece[1]], microbatch, "ab".index(piece[0]))


def _passes(kind: Kind, chunks: range, stages: int, microbatches: int) -> Iterator[Action]:
    """Passes over all micro batches, in groups of `stages`; a group runs chunk after chunk."""
    for first in range(0, microbatches, stages):
        for chunk in chunks:
            for microbatch in range(first, min(first + stages, microbatches)):
                yield Action(kind, microbatch, chunk)


def _in_turn(forwards: Iterator[Action], backwards: Iterator[Action], ahead: int) -> Iterator[Action]:
    yield from islice(forwards, ahead)
    for pair in zip(forwards, backwards, strict=False):  # takes a forward first: none is lost
        yield from pair
    yield from backwards


def _with_weights(order: Iterator[Action], stage: int, microbatches: int) -> Iterator[Action]:
    for action in order:
        yield action
        if action.kind == "backward_input" and action.microbatch >= stage:
            yield Action("backward_weight", action.microbatch - stage)
    for microbatch in range(max(microbatches - stage, 0), microbatches):
        yield Action("backward_weight", microbatch)
