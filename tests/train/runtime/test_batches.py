"""Micro batches of a rank, and the thread that reads those to come."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event, active_count
from typing import Any

import numpy as np
import pytest
import torch

from mpctl.core.errors import InputError
from mpctl.spec.load import load_job
from mpctl.train.data.samples import Fields
from mpctl.train.families.implementation import Objective
from mpctl.train.runtime.batches import Batches, ReadAhead, host_fields, sent_batch
from mpctl.train.runtime.mesh import AxisPosition
from mpctl.train.runtime.train import Trainer
from mpctl.train.transport.group import Group
from tests.train.runtime.tiny import column, make_trainer, settings, tiny_job

CPU = torch.device("cpu")
FEW = {"training__steps": 5, "training__eval_samples": 0, "checkpoint__interval": 0, "checkpoint__at_end": False}


class TwoArrays:
    """Samples of 8 tokens from 10 x number on, whose weights are halves."""

    dataset: Any = None

    def batch(self, numbers: Sequence[int]) -> Fields:
        tokens = 10 * np.array(numbers)[:, None] + np.arange(8)
        return {"tokens": tokens, "targets": tokens + 1, "weights": np.full(len(tokens), 0.5)}


OBJECTIVE: Objective = TwoArrays()  # type: ignore[assignment]


def test_a_batch_is_one_piece_of_memory() -> None:
    fields = TwoArrays().batch([3, 4])
    batch = sent_batch([3, 4], fields, CPU)
    assert batch.samples.tolist() == [3, 4] and batch.samples.dtype == torch.int64
    assert batch["weights"].tolist() == [0.5, 0.5] and batch["weights"].dtype == torch.float64
    assert {name: values.tolist() for name, values in fields.items()} == {name: batch[name].tolist() for name in fields}
    tensors = [batch.samples, *batch.fields.values()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert tensors[0].untyped_storage().nbytes() == 8 * (2 + 2 * 8 + 2 * 8 + 2)
    assert all(tensor.is_contiguous() for tensor in tensors)


def test_context_parallelism_takes_its_blocks_on_the_host() -> None:
    """By hand: 8 positions over 2 ranks: the second has 2 to 5."""
    model = load_job(None, settings()).model
    assert model is not None
    parts = host_fields(OBJECTIVE, [3], model=model, cp=Group(1, 2, name="cp"))
    assert parts["tokens"].tolist() == [[32, 33, 34, 35]]
    assert parts["weights"].tolist() == [0.5]


def reading_ahead(trainer: Trainer) -> Trainer:
    trainer.batches = replace(trainer.batches, reads_ahead=True)
    return trainer


@pytest.mark.parametrize("changes", [{}, {"training__skip_batches": "2, 4"}])
def test_reading_ahead_changes_nothing(data: Path, tmp_path: Path, changes: Any) -> None:
    job = tiny_job(data, **FEW, **changes)
    before, losses = threading.active_count(), []
    for ahead in (False, True):
        trainer = make_trainer(job, tmp_path / str(ahead))
        assert not trainer.batches.reads_ahead  # on a CPU
        if ahead:
            reading_ahead(trainer)
        losses.append(column([{"records": list(trainer.run())}]))
    assert losses[0] == losses[1] and len(losses[0]) == 5
    assert threading.active_count() == before


def test_what_is_read_ahead_fails_at_its_step(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples 16 to 23, those of the third step, hold a token that the model does not have."""
    trainer = reading_ahead(make_trainer(tiny_job(data, **FEW), tmp_path))
    objective = trainer.batches.train
    batch = objective.batch

    def broken(numbers: Sequence[int]) -> Fields:
        return {k: v + 1000 * (16 in numbers) for k, v in batch(numbers).items()}

    monkeypatch.setattr(objective, "batch", broken)
    records = trainer.run()
    assert [next(records)["step"], next(records)["step"]] == [1, 2]
    with pytest.raises(InputError, match=r"token 1\d\d\d in .* is outside the model's vocabulary"):
        next(records)
    assert trainer.doing == "step 3"


def test_a_thread_is_for_devices_that_compute_beside_the_host(data: Path) -> None:
    def reads_ahead(kind: str) -> bool:
        place, cp = AxisPosition(), Group(name="cp")
        job, device = tiny_job(data, **FEW), torch.device(kind)
        return Batches.open(job, data=data, dp=place, cp=cp, device=device).reads_ahead

    assert reads_ahead("cuda") and not reads_ahead("cpu")


def items_of(step: int) -> Iterator[str]:
    """Two items a step; step 3 has none, and the second of step 5 is broken."""
    if step == 3:
        return
    yield f"{step}a"
    if step == 5:
        raise InputError.of("token-outside-vocabulary", "data", "token 7 of 5", "prepare it anew")
    yield f"{step}b"


def test_steps_come_in_order_and_whole() -> None:
    reader = ReadAhead(items_of, stop=5, depth=3)
    assert [list(reader.step(n)) for n in range(5)] == [["0a", "0b"], ["1a", "1b"], ["2a", "2b"], [], ["4a", "4b"]]
    reader.close()


def test_it_reads_so_far_ahead_and_no_farther() -> None:
    read, is_far = [], Event()

    def noted(step: int) -> Iterator[int]:
        for item in range(2):
            read.append((step, item))
            if (step, item) == (1, 1):
                is_far.set()
            yield item

    reader = ReadAhead(noted, stop=100, depth=4)
    first = reader.step(0)
    assert next(first) == 0
    assert is_far.wait(10)  # taken: 0; waiting: 1, the end, 0 and 1 of step 1
    assert read == [(0, 0), (0, 1), (1, 0), (1, 1)]
    reader.close()


def test_an_error_is_raised_where_its_item_is_due() -> None:
    reader = ReadAhead(items_of, stop=9, depth=8)
    assert list(reader.step(4)) == ["4a", "4b"]
    fifth = reader.step(5)
    assert next(fifth) == "5a"
    with pytest.raises(InputError, match="token 7 of 5"):
        next(fifth)
    assert list(reader.step(6)) == ["6a", "6b"]
    reader.close()


def test_a_step_can_be_read_again_or_left() -> None:
    reader = ReadAhead(items_of, stop=3, depth=2)
    assert [list(reader.step(n)) for n in (0, 0, 2, 2, 1)] == [
        ["0a", "0b"],
        ["0a", "0b"],
        ["2a", "2b"],
        ["2a", "2b"],
        ["1a", "1b"],
    ]
    left = reader.step(2)
    next(left)
    assert list(reader.step(0)) == ["0a", "0b"]
    assert list(reader.step(7)) == ["7a", "7b"]  # beyond the last, as a benchmark steps
    reader.close()


def test_a_closed_reader_leaves_no_thread() -> None:
    before = active_count()
    reader = ReadAhead(items_of, stop=1000, depth=1)
    next(reader.step(10))
    assert active_count() == before + 1
    reader.close()
    assert active_count() == before
    reader.close()
