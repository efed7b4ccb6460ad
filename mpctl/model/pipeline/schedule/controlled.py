"""V-shaped schedules with controllable memory, arXiv 2405.15362: v-half and v-min.

A block of slots, one for each piece of work of a micro batch, repeats every PERIOD slots; weights
fill what is free. Where the pipeline fills and empties, work then moves to earlier free slots as
far as its inputs and the block's memory allow: once with weights as they lie, once with weights
filling again what is free. The middle repeats, so that only LONGEST micro batches a stage are ever
arranged.

>>> order = controlled_order("v-min", stage=1, stages=2, microbatches=2)
>>> " ".join(f"{piece}{microbatch}" for piece, microbatch in order)
'aF0 bF0 bI0 aI0 aF1 bF1 bW0 aW0 bI1 aI1 bW1 aW1'
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

PERIOD = 6
LONGEST = 4  # times the stages: micro batches that are arranged; more repeat the middle
PIECES = ("aF", "bF", "bI", "aI")  # by number, in the order of a micro batch; weights are 4
WEIGHTS = 4

Slots = list[list[int]]  # of one stage: by piece and micro batch
Event = tuple[int, int, int, int]  # slot, stage, piece, micro batch


def building_block(name: str, stages: int) -> list[list[int]]:
    """First slot of each piece by stage."""
    p = stages
    if name == "v-half":
        gap = 0 if p % 2 else 3
        return [[2 * s, 3 * p - s - 2, 3 * p + gap + 2 * s - 1, 6 * p + gap - s - 2] for s in range(p)]
    gap = 0 if p % 3 else 2
    return [[s, 2 * p - s - 1, 2 * p + gap + s, 4 * p + gap - s - 1] for s in range(p)]


def controlled_order(name: str, *, stage: int, stages: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """The work of a stage in one step, as v_shaped.py names it."""
    arranged = min(microbatches, LONGEST * stages)
    order, more = _arranged(name, stages, arranged)[stage], microbatches - arranged
    if not more:
        yield from order
        return
    starts = [at for at, (piece, _) in enumerate(order) if piece == "aF"]
    first, end = starts[arranged // 2], starts[arranged // 2 + 1]
    yield from order[:end]
    for later in range(1, more + 1):
        yield from ((piece, microbatch + later) for piece, microbatch in order[first:end])
    yield from ((piece, microbatch + more) for piece, microbatch in order[end:])


@lru_cache(maxsize=256)
def _arranged(name: str, stages: int, microbatches: int) -> tuple[tuple[tuple[str, int], ...], ...]:
    rows = range(0, PERIOD * microbatches, PERIOD)
    slots = [[[first + later for later in rows] for first in block] for block in building_block(name, stages)]
    slots = _squeezed(_Advance([[*own, _weights(own)] for own in slots], fixed_weights=True).run())
    slots = _Advance([own[:WEIGHTS] for own in slots], fixed_weights=False).run()
    return tuple(_in_order(own) for own in slots)


def _weights(own: Slots) -> list[int]:
    """Slots of weights, in order: those that are free once there is a gradient of inputs."""
    taken = {slot: piece for piece, slots in enumerate(own) for slot in slots}
    found, due, slot, last = list[int](), 0, 0, max(taken)
    while slot <= last or due:
        if slot in taken:
            due += taken[slot] >= 2
        elif due:
            found.append(slot)
            due -= 1
        slot += 1
    return found


def _in_order(own: Slots) -> tuple[tuple[str, int], ...]:
    """The work of a stage, weights in free slots: those of chunk b first, from the oldest."""
    taken = {slot: (piece, number) for piece, slots in enumerate(own) for number, slot in enumerate(slots)}
    order, due = list[tuple[str, int]](), {"bW": list[int](), "aW": list[int]()}
    for slot in range(max(taken) + 1):
        if slot in taken:
            piece, number = taken[slot]
            order.append((PIECES[piece], number))
            if piece >= 2:
                due["bW" if piece == 2 else "aW"].append(number)
        else:
            waiting = next((name for name, numbers in due.items() if numbers), None)
            if waiting is not None:
                order.append((waiting, due[waiting].pop(0)))
    order += [(name, number) for name, numbers in due.items() for number in numbers]
    return tuple(order)


def _events(slots: Sequence[Slots]) -> list[Event]:
    """All work, in the order of slots."""
    return sorted(
        (slot, stage, piece, number)
        for stage, own in enumerate(slots)
        for piece, row in enumerate(own)
        for number, slot in enumerate(row)
    )


def _before(slots: Sequence[Slots], stage: int, piece: int, number: int) -> int:
    """The slot of the last work that must be over."""
    last = slots[stage][piece][number - 1] if number else -1
    if piece == WEIGHTS:
        return last  # and of its gradient of inputs, which the caller knows
    if piece:
        last = max(last, slots[stage][piece - 1][number])
    other = stage - 1 if piece in (0, 2) else stage + 1
    if 0 <= other < len(slots):
        last = max(last, slots[other][piece][number])
    return last


def _squeezed(slots: Sequence[Slots]) -> list[Slots]:
    """The same order without slots in which a stage waits for nothing."""
    found = [[[0] * len(row) for row in own] for own in slots]
    free = [0] * len(slots)
    for _, stage, piece, number in _events(slots):
        start = max(_before(found, stage, piece, number) + 1, free[stage])
        found[stage][piece][number] = start
        free[stage] = start + 1
    return found


class _Rank(NamedTuple):
    """taken: the piece in each slot that is settled or to come; settled: slots of work that will
    not move any more."""

    taken: dict[int, int]
    settled: set[int]


class _Advance:
    """Moves the work of all stages to earlier slots, in one walk through the slots."""

    def __init__(self, slots: list[Slots], *, fixed_weights: bool) -> None:
        self.slots, self.fixed = slots, fixed_weights
        self.ranks = [_Rank({slot: piece for piece, row in enumerate(own) for slot in row}, set()) for own in slots]
        self.most = max(self._held(stage) for stage in range(len(slots)))

    def run(self) -> list[Slots]:
        """Return the slots after the walk."""
        last, filling, emptying = len(self.slots[0][0]) - 1, True, False
        for slot, stage, piece, number in _events(self.slots):
            if stage == 0 and piece == 3:
                filling = False
            moves = emptying or (filling and self.fixed)
            if not (filling or emptying) and piece == 0 and number == last:
                emptying = True
            self._settle(stage, piece, number, slot if not moves else self._earliest(slot, stage, piece, number))
        return self.slots

    def _settle(self, stage: int, piece: int, number: int, slot: int) -> None:
        own, rank = self.slots[stage], self.ranks[stage]
        del rank.taken[own[piece][number]]
        own[piece][number] = slot
        rank.taken[slot] = piece
        rank.settled.add(slot)

    def _earliest(self, slot: int, stage: int, piece: int, number: int) -> int:
        rank = self.ranks[stage]
        first = _before(self.slots, stage, piece, number)
        if piece == WEIGHTS:
            gradients = sorted(self.slots[stage][2] + self.slots[stage][3])
            first = max(first, gradients[number])
        del rank.taken[slot]
        for possible in range(first + 1, slot):
            if possible in rank.settled:
                continue
            rank.taken[possible] = piece
            fits = self._held(stage) <= self.most
            del rank.taken[possible]
            if fits:
                break
        else:
            possible = slot
        rank.taken[slot] = piece
        return possible

    def _held(self, stage: int) -> int:
        """Activations that a stage holds at most."""
        taken, held, most, due = self.ranks[stage].taken, 0, 0, 0
        for slot in range(max(taken) + 1):
            piece = taken.get(slot)
            if piece is None:
                if due and not self.fixed:
                    held, due = held - 1, due - 1
            elif piece == WEIGHTS:
                held -= 1
            elif piece >= 2:
                due += 1
            else:
                held += 1
                most = max(most, held)
        return most
