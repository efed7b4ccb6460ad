"""The orders of schedules whose two chunks a stage form a V: chunk b comes back past chunk a.

Stage s of p holds virtual stages s (chunk a) and 2p - 1 - s (chunk b), so stage 0 has both ends of
the model and the last stage hands over to itself (placement.py). Pieces of work are named by chunk
and kind: aF a forward, bI gradients of inputs, bW gradients of weights, bB both at once.

    zbv         arXiv 2401.10241 section 6, in torch ScheduleZBVZeroBubble
    v-half      arXiv 2405.15362: half of 1F1B's activations
    v-min       the same, a third of them
    dualpipev   DeepSeek's DualPipeV; a forward and the backward paired with it run one after the other

v-half and v-min are in controlled.py.

>>> order = zbv(stage=1, stages=2, microbatches=3)
>>> " ".join(f"{piece}{microbatch}" for piece, microbatch in order)
'aF0 bF0 aF1 bF1 bI0 bW0 aF2 aI0 aW0 bF2 bI1 bW1 aI1 bI2 aI2 aW1 bW2 aW2'
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mpctl.model.pipeline.schedule.controlled import controlled_order

Work = tuple[str, int]
"""A piece and its micro batch."""


def v_order(name: str, *, stage: int, stages: int, microbatches: int) -> Iterator[Work]:
    """The work of a stage in one step, in order."""
    place = {"stage": stage, "stages": stages, "microbatches": microbatches}
    if name == "zbv":
        return zbv(**place)
    if name == "dualpipev":
        return dualpipev(**place)
    return controlled_order(name, **place)


def zbv(*, stage: int, stages: int, microbatches: int) -> Iterator[Work]:
    """Forwards until the pipeline is full, then one of each piece, weights last."""
    return (work for work in _zbv(stage, stages, max(microbatches, 2 * stages - 1)) if work[1] < microbatches)


def _zbv(stage: int, p: int, m: int) -> Iterator[Work]:
    """Of at least 2p - 1 micro batches."""
    work = _CountedPasses()
    yield from work.times(2 * (p - stage) - 1, "aF")
    yield from work.times(stage, "bF", "aF")
    yield from work.times(p - stage, "bF", "bI", "bW")
    yield from work.times(m - 2 * p + stage + 1, "aF", "aI", "aW", "bF", "bI", "bW")
    yield from work.times(p - stage - 1, "aI", "aW", "bF", "bI", "bW")
    yield from work.times(stage, "aI", "bI")
    yield from work.times(p - stage, "aI", "aW")
    yield from work.times(stage, "bW")
    yield from work.times(stage, "aW")


def dualpipev(*, stage: int, stages: int, microbatches: int) -> Iterator[Work]:
    """DeepSeek's eight phases, of at least 2p micro batches; weights that are put off run in the order in
    which they were."""
    work, after = _CountedPasses(), stages - stage - 1
    yield from work.times(2 * after, "aF")
    yield from work.times(stage + 1, "aF", "bF")
    yield from work.times(after, "bI", "bW", "bF")
    yield from work.times(microbatches - 2 * stages + stage + 1, "aF", "bB", "bF", "aB")
    yield from work.times(after, "bB", "bF", "aB")
    whole = (stage + 1) // 2 * 2 + (stage % 2 == 0)  # of the backwards of the sixth phase
    yield from work.times(1, *(("bB", "aB") * stages)[:whole])
    put_off = (("bI", "aI") * stages)[whole : 2 * stage + 2]
    yield from work.times(1, *put_off)
    weights = [*(f"{piece[0]}W" for piece in put_off), *["aW"] * after]
    for piece in weights[:after]:
        yield from work.times(1, piece, "aI")
    yield from work.times(1, *weights[after:])


class _CountedPasses:
    """Numbers the micro batches of each piece; weights have those of their gradients of inputs."""

    def __init__(self) -> None:
        self.next = Counter[str]()
        self.put_off: dict[str, list[int]] = {"a": [], "b": []}

    def times(self, times: int, *pieces: str) -> Iterator[Work]:
        """The next micro batch of each piece, several times."""
        for piece in pieces * times:
            chunk, kind = piece[0], piece[1]
            if kind == "W":
                yield piece, self.put_off[chunk].pop(0)
                continue
            way = chunk + ("F" if kind == "F" else "B")
            if kind == "I":
                self.put_off[chunk].append(self.next[way])
            yield piece, self.next[way]
            self.next[way] += 1
