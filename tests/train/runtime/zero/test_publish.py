"""ZeRO 1 and 2: parameters that arrive while the next forward computes, each before it is used."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpctl.core.sharding import View
from mpctl.model.layout.buckets import Bucket
from mpctl.model.pipeline.schedule.orders import Action
from mpctl.spec.load import parse
from mpctl.train.runtime.zero.gather import ParameterArrival
from mpctl.train.runtime.zero.param_store import BucketShard, SlicedParamStore
from mpctl.train.transport.group import Group, Pending
from tests.ranks import run_ranks
from tests.train.runtime.test_pipeline import layout, pipeline_job, whole_pipelines
from tests.train.runtime.tiny import column, make_trainer, train, whole_weights

GLOO = {"launch__shared_memory": False, "parallel__bucket_bytes": 40_000}


@dataclass
class LateWork:
    """Fills a buffer when it is waited for."""

    whole: Tensor
    part: Tensor
    waited: list[int]
    unit: int

    def wait(self) -> Any:
        self.waited.append(self.unit)
        self.whole.copy_(self.part)


@dataclass(frozen=True)
class LateGroup(Group):
    unit: int = 0
    waited: list[int] = field(default_factory=list)

    def start_all_gather_into(self, whole: Tensor, part: Tensor) -> Pending:
        return Pending(whole, LateWork(whole, part.clone(), self.waited, self.unit))


def arrival(waited: list[int], *units: int, chunks: tuple[int, ...] = (0,)) -> ParameterArrival:
    """Published stores of these units, of a stage whose layers are units 1 to 3 of each chunk."""
    stores = []
    for unit in units:
        bucket = Bucket((str(unit),), (64,), View(zero=1), chunks, unit)
        group = LateGroup(unit=unit, waited=waited)
        stores.append(SlicedParamStore(BucketShard(bucket, (nn.Parameter(torch.ones(64)),), group)))
        stores[-1].publish()
    return ParameterArrival(stores, [(1, 2, 3), (1, 2, 3)])


def test_a_forward_waits_where_a_bucket_begins() -> None:
    waited: list[int] = []
    found = arrival(waited, 4, 2, 0)
    found.begin(Action("forward", 0, 0))
    assert waited == [0]
    seen = []
    for unit in (1, 2, 3):
        found.enter(unit)
        seen.append(list(waited))
        found.leave(unit)
    assert seen == [[0], [0, 2], [0, 2]] and waited == [0, 2, 4]
    assert not any(store.pending is not None for store in found.stores)


def test_a_chunk_waits_for_its_own_and_a_backward_for_nothing() -> None:
    waited: list[int] = []
    found = arrival(waited, 0, 1, chunks=(1,))
    for action in (Action("forward", 0, 0), Action("backward", 0, 0)):
        found.begin(action)
        for unit in (1, 2, 3):
            found.enter(unit)
            found.leave(unit)
    assert waited == []
    found.begin(Action("forward", 0, 1))
    found.enter(1)
    assert waited == [0, 1]


def test_who_reads_parameters_between_steps_waits() -> None:
    for read in (
        lambda store: store.gather_full([store.local]),
        lambda store: store.full_value(store.shard.parameters[0]),
        lambda store: store.set_value(store.shard.parameters[0], torch.zeros(64)),
        lambda store: store.publish(),
    ):
        waited: list[int] = []
        read(arrival(waited, 7).stores[0])
        assert waited == [7]


def _under_way(rank: int, size: int, raw: dict[str, Any], folder: str) -> list[int]:
    """How many buckets are on their way after a step, after a save, and when the run has ended."""
    trainer, seen = make_trainer(parse(raw), Path(folder), rank), []

    def count() -> None:
        seen.append(sum(store.pending is not None for store in trainer.optimizer.stores))

    steps = trainer.run()
    next(steps)
    count()
    trainer.save()
    count()
    list(steps)
    count()
    return seen


@pytest.mark.parametrize("shared", [False, True])
def test_a_step_ends_before_its_parameters_arrive(data: Path, tmp_path: Path, shared: bool) -> None:
    """Not through shared memory, which the ranks copy themselves."""
    changes = {**GLOO, "parallel__zero": 1, "training__steps": 2, "launch__shared_memory": shared}
    job = pipeline_job(data, "gpt", layout(1, dp=2), changes)
    for seen in run_ranks(_under_way, 2, job.model_dump(mode="json"), str(tmp_path)):
        assert (seen[0] > 4) is not shared and seen[1:] == [0, 0]


@pytest.mark.parametrize(
    ("zero", "how"),
    [(1, layout(1, dp=2)), pytest.param(2, layout(2, 2, dp=2), marks=pytest.mark.slow)],
    ids=["zero1", "zero2-interleaved"],
)
def test_it_is_the_same_to_the_bit(data: Path, tmp_path: Path, zero: int, how: dict[str, Any]) -> None:
    """Validated in between, so that a forward without backward is the first one too."""
    found = []
    for on in (True, False):
        changes = {**GLOO, "parallel__zero": zero, "parallel__overlap_gradients": on}
        changes |= {"training__eval_interval": 1, "training__steps": 3}
        ranks = train(pipeline_job(data, "gpt", how, changes), tmp_path / str(on))
        curves = [column(ranks, name) for name in ("loss", "grad_norm", "validation_loss")]
        found.append((curves, ranks[0]["traffic"], whole_weights(whole_pipelines(ranks))))
    assert found[0][:2] == found[1][:2]
    for name, weight in found[1][2].items():
        assert torch.equal(found[0][2][name], weight), name
