"""What is whole in memory while a stage of slices gets its initial weights, and while it is saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.model.layout.job_layout import JobLayout
from mpctl.records.checkpoint.verify import find_damage
from mpctl.spec.job import JobSpec
from mpctl.train.runtime.build import build_trainer
from mpctl.train.runtime.environment import RuntimeEnvironment
from mpctl.train.runtime.optimizer import Optimizer
from mpctl.train.runtime.train import Trainer
from mpctl.train.runtime.zero.param_store import Zero3ParamStore
from tests.train.runtime.tiny import make_trainer, tiny_job, tiny_plan

SHORT = {"training__steps": 1, "training__eval_samples": 0, "parallel__bucket_bytes": 10_000}
LORA = {"training__adapter__rank": 4}


def small_job(data: Path, **changes: Any) -> JobSpec:
    return tiny_plan(tiny_job(data, **{**SHORT, **changes})).job


def sliced_trainer(job: JobSpec, folder: Path) -> Trainer:
    """A trainer in one process that keeps slices as at ZeRO 3, each of a whole bucket."""
    known = JobLayout.of(job)
    views = {name: view._replace(zero=3) for name, view in known.views.items()}
    layout = JobLayout.assemble(job, known.model, known.table, known.stages, views=views)
    return build_trainer(folder, layout, 0, RuntimeEnvironment.of_machine(job, folder, local_rank=0))


def values_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: trainer.optimizer.full_value(p).detach().clone() for p, name in trainer.names.items()}


def trained(job: JobSpec, folder: Path) -> dict[str, Tensor]:
    """Train and save; the values at the end."""
    trainer = make_trainer(job, folder)
    list(trainer.run())
    (folder / "job.json").write_text(job.model_dump_json())
    return values_of(trainer)


@pytest.fixture(scope="module")
def base(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("base")
    return folder, trained(small_job(data), folder)


class Alive:
    """Which tensors are in memory, by what they are of. most: the most at one time; seen: all."""

    def __init__(self) -> None:
        self.held, self.most, self.seen = list[tuple[str, weakref.ref[Any]]](), 0, set[str]()

    def watch(self, of: str, make: Callable[[], Tensor]) -> Tensor:
        tensor = make()
        self.held.append((of, weakref.ref(tensor.untyped_storage())))
        self.most = max(self.most, len({name for name, storage in self.held if storage() is not None}))
        self.seen.add(of)
        return tensor


@pytest.fixture
def unsharded(monkeypatch: pytest.MonkeyPatch) -> Alive:
    """The full values that were asked for."""
    alive, take = Alive(), Optimizer.full_value

    def full_value(optimizer: Optimizer, parameter: Tensor) -> Tensor:
        return alive.watch(str(id(parameter)), lambda: take(optimizer, parameter))

    monkeypatch.setattr(Optimizer, "full_value", full_value)
    return alive


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> Alive:
    """The buckets that were gathered, by their first parameter."""
    alive, gather = Alive(), Zero3ParamStore.gather_full

    def gather_full(store: Zero3ParamStore, local: list[Tensor]) -> list[Tensor]:
        full: list[Tensor] = []
        alive.watch(store.shard.bucket.names[0], lambda: full.extend(gather(store, local)) or full[0])
        return full

    monkeypatch.setattr(Zero3ParamStore, "gather_full", gather_full)
    return alive


def test_initial_weights_are_whole_one_by_one(
    base: tuple[Path, dict[str, Tensor]], data: Path, tmp_path: Path, unsharded: Alive
) -> None:
    folder, expected = base
    trainer = sliced_trainer(small_job(data, training__init_from=str(folder)), tmp_path)
    assert len(trainer.optimizer.stores) > 2 and isinstance(trainer.optimizer.stores[0], Zero3ParamStore)
    assert len(unsharded.seen) == len(expected) and unsharded.most == 1
    found = values_of(trainer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_adapters_go_on_over_their_base_and_are_not_merged(
    base: tuple[Path, dict[str, Tensor]], data: Path, tmp_path: Path, unsharded: Alive
) -> None:
    """Although most of the parameters that are read one by one are none of an adapter."""
    first = small_job(data, **LORA, training__init_from=str(base[0]))
    expected = trained(first, tmp_path / "first")
    assert any(value.any() for name, value in expected.items() if name.endswith(".B.weight"))
    again = small_job(data, **LORA, training__init_from=str(tmp_path / "first"))
    found = values_of(sliced_trainer(again, tmp_path / "again"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_save_gathers_one_bucket_at_a_time_and_none_that_it_leaves_out(
    base: tuple[Path, dict[str, Tensor]], data: Path, tmp_path: Path, gathered: Alive, is_saved: bool
) -> None:
    changes = {"training__freeze": ["embedding.*", "layers.0.*"]} if is_saved else LORA
    trainer = sliced_trainer(small_job(data, **changes, training__init_from=str(base[0])), tmp_path)
    trainer.save()
    frozen = {store.shard.bucket.names[0] for store in trainer.optimizer.frozen}
    assert len(frozen) > 1 and gathered.seen - frozen
    assert gathered.seen & frozen == (frozen if is_saved else set())
    assert gathered.most == 1
    assert find_damage(tmp_path / "checkpoints/step-0") == []
