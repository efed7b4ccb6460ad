"""When gradients are reduced: once a step, in one order, in the backward that completes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpctl.model.pipeline.schedule.orders import Action
from mpctl.spec.load import parse
from mpctl.train.layers.parameters import DeferredWgrad, DefersWgrad
from mpctl.train.runtime.pass_listener import PassListener
from mpctl.train.runtime.train import Trainer
from mpctl.train.runtime.zero.overlap import GradientOverlap
from tests.ranks import run_ranks
from tests.train.runtime.test_pipeline import ZERO, layout, pipeline_job
from tests.train.runtime.tiny import column, make_trainer, train

SMALL = {"parallel__bucket_bytes": 40_000, "training__steps": 2, "training__eval_samples": 0}
Event = tuple[Any, ...]


class Log(PassListener):
    """What the passes tell, and between it each reduction that starts, by its place in line."""

    def __init__(self, trainer: Trainer) -> None:
        self.events: list[Event] = []
        for number, store in enumerate(trainer.gradients.stores):
            store.start = self._starting(number, store.start)  # type: ignore[method-assign]
        listeners = trainer.pipeline.listeners
        assert isinstance(listeners, list)  # the layers' hooks tell the same list
        listeners.insert(0, self)

    def _starting(self, number: int, start: Any) -> Any:
        def starting() -> Any:
            self.events.append(("start", number))
            return start()

        return starting

    def begin(self, action: Action) -> None:
        self.events.append((action.kind, action.microbatch, action.chunk))

    def back(self, unit: int) -> None:
        self.events.append(("back", unit))

    def weights(self) -> None:
        self.events.append(("weights",))

    def end(self, action: Action) -> None:
        self.events.append(("end",))


def logged(trainer: Trainer) -> tuple[list[Event], GradientOverlap]:
    """Of the second step."""
    log, steps = Log(trainer), trainer.run()
    next(steps)
    log.events.clear()
    next(steps)
    return log.events, trainer.gradients


def starts(events: list[Event]) -> list[int]:
    return [event[1] for event in events if event[0] == "start"]


def test_buckets_start_in_the_last_backward_as_soon_as_they_are_complete(data: Path, tmp_path: Path) -> None:
    """4 layers (units 1 to 4 between entry 0 and exit 5), 4 micro batches."""
    job = pipeline_job(data, "gpt", {}, SMALL)
    events, overlap = logged(make_trainer(job, tmp_path))
    assert starts(events) == list(range(len(overlap.stores))) and len(overlap.stores) > 4
    first, last = events.index(("start", 0)), events.index(("backward", 3, 0))
    assert last < first
    reached = 6
    for event in events[last:]:
        if event[0] == "back":
            reached = event[1]
        elif event[0] == "end":
            reached = -1
        elif event[0] == "start" and reached >= 0:
            assert overlap.stores[event[1]].shard.bucket.unit > reached
    # the last layer's travel while the first is computed
    assert events.index(("start", 1)) < max(i for i, e in enumerate(events) if e == ("back", 1))


def test_in_each_micro_batch_where_gradients_are_not_kept_whole(data: Path, tmp_path: Path) -> None:
    trainer = make_trainer(pipeline_job(data, "gpt", {}, SMALL), tmp_path)
    for store in trainer.gradients.stores:
        store.reduces_each = True
    events, overlap = logged(trainer)
    assert starts(events) == 4 * list(range(len(overlap.stores)))


def test_a_backward_in_one_waits_for_the_gradients_that_it_defers(data: Path, tmp_path: Path) -> None:
    """As under dualpipev, which defers only some: in backward autograd calls the hooks of all weights."""
    trainer, deferred = make_trainer(pipeline_job(data, "gpt", {}, SMALL), tmp_path), DeferredWgrad()
    for module in trainer.model.modules():
        if isinstance(module, DefersWgrad):
            module.defer_wgrad(deferred)
    trainer.pipeline.deferred_wgrad = deferred
    for store in trainer.gradients.stores:
        store.reduces_each = True
    overlap = GradientOverlap(trainer.gradients.buffer, [Action("backward", 3)], early=True)
    listeners = trainer.pipeline.listeners
    assert isinstance(listeners, list)
    listeners[listeners.index(trainer.gradients)] = trainer.gradients = overlap
    events, _ = logged(trainer)
    last = events[events.index(("backward", 3, 0)) :]
    before, after = (starts(part) for part in (last[: last.index(("weights",))], last[last.index(("weights",)) :]))
    assert sorted(before + after) == list(range(len(overlap.stores)))
    late = [number for number, parameters in enumerate(overlap.deferred) if parameters]
    assert [number for number in after if number in late] == late != []


def _of_stages(rank: int, size: int, raw: dict[str, Any], folder: str) -> list[list[Any]]:
    events, overlap = logged(make_trainer(parse(raw), Path(folder), rank))
    later = [bool(deferred) for deferred in overlap.deferred]
    return [[list(event) for event in events], later]


@pytest.mark.parametrize(
    "how",
    [layout(2, schedule=ZERO), pytest.param(layout(2, 2), marks=pytest.mark.slow)],
    ids=["zero-bubble", "interleaved"],
)
def test_of_a_pipeline_each_starts_once_in_the_last_pass_that_adds_to_it(
    data: Path, tmp_path: Path, how: dict[str, Any]
) -> None:
    """Put off gradients come in the action of their own."""
    job = pipeline_job(data, "gpt", how, {**SMALL, "parallel__bucket_bytes": 20_000})
    for events, later in run_ranks(_of_stages, 2, job.model_dump(mode="json"), str(tmp_path)):
        found, at = {}, None
        for event in events:
            if event[0] == "start":
                assert event[1] not in found
                found[event[1]] = at
            elif event[0] not in ("back", "weights", "end"):
                at = event
        assert sorted(found) == list(range(len(later)))
        for number, (kind, micro_batch, _) in found.items():
            assert micro_batch == job.num_microbatches - 1
            assert (kind == "backward_weight") is later[number]
        assert any(later) is (job.parallel.schedule == ZERO)


@pytest.mark.slow
@pytest.mark.parametrize("zero", range(4))
def test_overlapped_or_not_it_is_the_same_to_the_bit(data: Path, tmp_path: Path, zero: int) -> None:
    curves = []
    for on in (True, False):
        how = {**SMALL, "parallel__overlap_gradients": on, "parallel__zero": zero}
        job = pipeline_job(data, "gpt", layout(1, dp=2), how)
        ranks = train(job, tmp_path / str(on))
        curves.append((column(ranks), column(ranks, "grad_norm"), ranks[0]["traffic"]))
    assert curves[0] == curves[1]
