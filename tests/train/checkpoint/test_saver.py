"""Training continues while a thread writes the copies from between two steps: the same files."""

from __future__ import annotations

import os
import shutil
import signal
import time
import weakref
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

import pytest
import torch

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.states import checkpoint_bytes, snapshot_bytes
from mpctl.records.checkpoint.folder import list_checkpoints
from mpctl.records.checkpoint.verify import find_damage
from mpctl.spec.load import parse
from mpctl.train.checkpoint import saver as savers
from mpctl.train.checkpoint import writer as writing
from mpctl.train.checkpoint.snapshot import HostCopies, Snapshot, take_snapshot
from mpctl.train.checkpoint.tensor_file import Entry, write_file
from mpctl.train.checkpoint.writer import SaveFailed
from mpctl.train.runtime.train import Trainer
from tests.ranks import run_ranks
from tests.streams import LoggedStream
from tests.train.checkpoint.shards import shard_record
from tests.train.runtime.test_experts import MOE
from tests.train.runtime.test_pipeline import layout
from tests.train.runtime.tiny import column, make_trainer, tiny_job, train

Usage = namedtuple("Usage", "total used free")
EVERY = {"checkpoint__interval": 2, "training__steps": 6, "training__eval_samples": 0}
HELD_SECONDS = 20.0


class HeldDisk:
    """Begins to write the shard of step N once `may_write(N)`; written: these steps, as they end.
    A save that is held for HELD_SECONDS fails."""

    def __init__(self, may_write: Callable[[int], bool]) -> None:
        self.may_write = may_write
        self.reached = Event()
        self.written: list[int] = []

    def __call__(self, path: Path, entries: list[Entry], on_bytes: Any) -> Any:
        step, deadline = int(path.parent.name.split(".")[1].removeprefix("step-")), time.monotonic() + HELD_SECONDS
        self.reached.set()
        while not self.may_write(step):
            assert time.monotonic() < deadline, f"step {step} was held for {HELD_SECONDS:g} s"
            time.sleep(0.002)
        file = write_file(path, entries, on_bytes)
        self.written.append(step)
        return file


def _digests(run_dir: Path) -> dict[tuple[int, int], str]:
    """sha256 of every shard, by (step, shard)."""
    return {
        (step, int(path.stem.partition("-")[2])): shard_record(folder, int(path.stem.partition("-")[2])).sha256
        for step, folder in list_checkpoints(run_dir / "checkpoints")
        for path in folder.glob("shard-*.json")
    }


def test_training_continues_while_a_thread_writes(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are those of a synchronous run, to the byte, though the parameters have changed
    before they were written."""
    synchronous = tiny_job(data, **EVERY, checkpoint__asynchronous=False)
    list(make_trainer(synchronous, tmp_path / "a").run())
    trainer = make_trainer(tiny_job(data, **EVERY), tmp_path / "b")
    disk = HeldDisk(lambda step: trainer.step > step or step == 6)
    monkeypatch.setattr(writing, "write_file", disk)
    records = list(trainer.run())
    assert _digests(tmp_path / "a") == _digests(tmp_path / "b")
    assert [step for step, _ in list_checkpoints(tmp_path / "b/checkpoints")] == disk.written == [2, 4, 6]
    times = trainer.saver.times
    assert [save["step"] for save in times] == [2, 4, 6]
    assert all(save["stall_seconds"] < save["seconds"] for save in times[:2])
    stalls = {r["step"]: r["save_stall_seconds"] for r in records if "save_stall_seconds" in r}
    # 6 is saved before it is validated and recorded
    assert stalls == {3: times[0]["stall_seconds"], 5: times[1]["stall_seconds"], 6: times[2]["stall_seconds"]}
    seconds = [r["save_seconds"] for r in records if "save_seconds" in r]
    assert seconds and {*seconds} <= {save["seconds"] for save in times}


def test_the_next_save_waits_for_the_one_before(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And reports it: the shard of step 2 is held until training waits after step 4."""
    job = tiny_job(data, **{**EVERY, "training__steps": 4})
    trainer = make_trainer(job, tmp_path)
    saver, began = trainer.saver, list[tuple[float, set[int]]]()

    def is_awaited(step: int) -> bool:
        if trainer.step == 4 and saver.is_awaited:
            began.append((saver.clock(), {*saver.saved}))
        return step == 4 or bool(began)

    def write(path: Path, entries: list[Entry], on_bytes: Any) -> Any:
        file = disk(path, entries, on_bytes)
        ended.append(saver.clock())
        return file

    disk, ended = HeldDisk(is_awaited), list[float]()
    monkeypatch.setattr(writing, "write_file", write)
    list(trainer.run())
    at, saved = began[0]
    assert saved == {2} and disk.written == [2, 4]
    assert saver.times[1]["stall_seconds"] >= ended[0] - at > 0


@pytest.mark.parametrize(
    ("tp", "dp", "changes"),
    [
        (1, 2, {"parallel__zero": 3, "training__dtype": "bf16", "training__freeze": ["layers.1.mlp.*"]}),
        pytest.param(2, 2, {"parallel__zero": 1}, marks=pytest.mark.slow),
        pytest.param(1, 1, {"parallel__pp": 2, "cluster__gpus_per_node": 2}, marks=pytest.mark.slow),
    ],
)
def test_several_ranks_write_the_same_bytes(
    data: Path, tmp_path: Path, tp: int, dp: int, changes: dict[str, Any]
) -> None:
    for name, is_async in (("a", False), ("b", True)):
        job = tiny_job(data, tp, dp, **EVERY, **changes, checkpoint__asynchronous=is_async)
        train(job, tmp_path / name)
    assert _digests(tmp_path / "a") == _digests(tmp_path / "b") != {}


def test_the_memory_of_all_copies_is_one_block_as_planned(data: Path, tmp_path: Path) -> None:
    """Taken before the first step, in the order of the file; a save takes no more."""
    job = tiny_job(data, **EVERY, training__dtype="bf16", training__freeze=["layers.0.mlp.*"])
    trainer = make_trainer(job, tmp_path)
    copies = trainer.saver.copies
    assert copies is not None and copies.tensors == {}
    steps = trainer.run()
    next(steps)
    assert trainer.saver.times == [] and trainer.saver.current is None
    parts = list(copies.tensors.values())
    assert len({part.untyped_storage()._cdata for part in parts}) == 1
    assert parts[0].untyped_storage().nbytes() == snapshot_bytes(JobLayout.of(job))
    starts = {part.data_ptr(): part.nbytes for part in parts}
    assert list(starts) == sorted(starts)
    assert all(a + starts[a] == b for a, b in pairwise(starts))
    before = {name: part.data_ptr() for name, part in copies.tensors.items()}
    list(steps)
    assert {name: part.data_ptr() for name, part in copies.tensors.items()} == before
    assert [save["step"] for save in trainer.saver.times] == [2, 4, 6]


def _reserved(rank: int, size: int, raw: dict[str, Any], run_dir: str) -> int:
    trainer = make_trainer(parse(raw), Path(run_dir), rank)
    next(trainer.run())
    assert trainer.saver.copies is not None
    return sum(part.nbytes for part in trainer.saver.copies.tensors.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{**layout(2), "model__layers": 4}, {"dp": 2, "parallel__ep": 2, **MOE}, {"tp": 2, "dp": 2}],
    ids=["stages", "experts", "replicas"],
)
def test_the_rank_with_the_largest_shard_is_planned(data: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    """All ranks together reserve what a checkpoint has."""
    job = tiny_job(data, **{**EVERY, **how})
    raw, plan = job.model_dump(mode="json"), JobLayout.of(job)
    reserved = run_ranks(_reserved, job.world_size, raw, str(tmp_path))
    assert max(reserved) == snapshot_bytes(plan)
    assert sum(reserved) == checkpoint_bytes(plan)


def test_memory_of_the_copies_is_used_again() -> None:
    copies, source = HostCopies(), torch.arange(6.0)
    first = copies.keep("a/value", source[:3])
    source += 1
    assert first.tolist() == [0, 1, 2]
    second = copies.keep("a/value", source[:3])
    assert second.data_ptr() == first.data_ptr() and second.tolist() == [1, 2, 3]
    assert copies.keep("a/value", source).tolist() == [1, 2, 3, 4, 5, 6]
    assert copies.keep("a/value", source.bfloat16()).dtype == torch.bfloat16


def test_copies_run_during_computation() -> None:
    """Kept tensors are copied at this point of the computation and are held until it waits; what
    was gathered for the save is copied before the computation goes on."""
    stream = LoggedStream()
    copies = HostCopies(stream)
    source = torch.ones(3)
    kept = weakref.ref(source)
    copies.keep("a/value", source)
    copies.keep("b/value", torch.ones(3), is_passing=True)
    assert stream.log == ["follow", "copy", "follow", "copy", "join"]
    del source
    assert kept() is not None
    copies.join()
    assert kept() is None and stream.log[5:] == ["join"]


def test_the_next_update_and_the_writer_wait_for_the_copies(data: Path, tmp_path: Path) -> None:
    job = tiny_job(data, **{**EVERY, "training__steps": 2})
    trainer, stream = make_trainer(job, tmp_path), LoggedStream()
    trainer.one_step()
    assert trainer.saver.copies is not None
    trainer.saver.copies.stream = stream
    trainer.begin_save()
    trainer.saver.finish()
    copied = stream.log.index("marked")
    assert "join" not in stream.log and stream.log[:copied].count("copy") > 3
    trainer.one_step()
    assert stream.log[copied:] == ["marked", "join"]


# ---------------------------------------------------------------- failures


def _fail_in_background(rank: int, size: int, raw: dict[str, Any], run_dir: str) -> list[Any]:
    """The disk of rank 1 is full; the step at which each rank stops, and its message."""
    trainer = make_trainer(parse(raw), Path(run_dir), rank)

    def full(path: Path, entries: list[Entry], on_bytes: Any) -> Any:
        raise OSError(28, "No space left on device")

    if rank == 1:
        writing.write_file = full
    steps = []
    try:
        for record in trainer.run():
            steps.append(record["step"])
            time.sleep(0.05)
    except SaveFailed as error:
        return [trainer.step, str(error), trainer.doing]
    return steps


def test_a_failed_save_ends_all_ranks_at_the_same_step(data: Path, tmp_path: Path) -> None:
    raw = tiny_job(data, 2, **{**EVERY, "training__steps": 500}).model_dump(mode="json")
    secondary, cause = run_ranks(_fail_in_background, 2, raw, str(tmp_path))
    assert secondary[0] == cause[0] < 20
    assert "No space left on device" in cause[1] and "gave up" not in cause[1]
    assert secondary[1].startswith("gave up saving with its peers: ") and cause[1] in secondary[1]
    assert cause[2].startswith("saving step 2")
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_whatever_goes_wrong_in_the_thread_is_raised(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(writing, "publish", fail)
    trainer = make_trainer(tiny_job(data, **EVERY), tmp_path)
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        list(trainer.run())
    assert isinstance(trainer.saver.failure, ZeroDivisionError)


class LostDevice:
    """A mark in a device's stream that is never reached."""

    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")


def test_copies_that_do_not_arrive_fail_their_own_save(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Announced under the number of the save that other ranks wait for."""
    trainer = make_trainer(tiny_job(data), tmp_path)
    barrier = trainer.saver.writer.barrier
    trainer.step = 1
    trainer.save()

    def without_device(*args: Any, **keywords: Any) -> Snapshot:
        return replace(take_snapshot(*args, **keywords), arrived=LostDevice())

    monkeypatch.setattr(savers, "take_snapshot", without_device)
    trainer.step = 2
    with pytest.raises(RuntimeError, match="CUDA error"):
        trainer.save()
    assert barrier.announced == {1: ["1/open", "1/written/0", "1/published"], 2: ["2/failed"]}


def test_a_checkpoint_that_cannot_fit_is_not_begun(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tiny_job(data, training__steps=1, training__eval_samples=0), tmp_path)
    list(trainer.run())
    needed = trainer.saver.writer.total_bytes
    assert needed > 100_000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, needed - 100_000))
    monkeypatch.setattr(writing, "write_file", None)  # nothing is written
    trainer.step = 2
    with pytest.raises(SaveFailed) as caught:
        trainer.save()
    for words in (" are needed and ", " are free, ", " are missing; ", "the last good checkpoint is step 1"):
        assert words in str(caught.value)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 0))  # not reported
    trainer.save()
    assert find_damage(tmp_path / "checkpoints/step-2") == []


def test_training_that_fails_lets_its_save_end(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tiny_job(data, **EVERY), tmp_path)
    failed = Event()
    monkeypatch.setattr(writing, "write_file", HeldDisk(lambda step: failed.is_set()))
    steps = trainer.run()
    next(steps), next(steps)
    monkeypatch.setattr(Trainer, "one_step", lambda trainer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(steps)
    assert list_checkpoints(tmp_path / "checkpoints") == []
    failed.set()
    trainer.saver.drain()
    assert [step for step, _ in list_checkpoints(tmp_path / "checkpoints")] == [2]


def test_a_save_that_stands_still_is_not_waited_for_after_a_failure(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, is_mended = make_trainer(tiny_job(data), tmp_path), Event()
    monkeypatch.setattr(writing, "write_file", HeldDisk(lambda step: is_mended.is_set()))
    monkeypatch.setattr(savers, "DRAIN_PATIENCE", 0.1)
    trainer.step = 2
    trainer.begin_save()
    current = trainer.saver.current
    assert current is not None and current.thread is not None
    trainer.saver.drain()
    assert current.thread.is_alive() and current.failure is None
    is_mended.set()
    current.thread.join()


def test_it_reports_when_training_begins_and_ends_to_wait(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the training thread, while the thread that writes is held and reports nothing."""
    trainer, said, is_ending = make_trainer(tiny_job(data), tmp_path), list[str](), Event()
    disk = HeldDisk(lambda step: is_ending.is_set() and bool(said))
    monkeypatch.setattr(writing, "write_file", disk)
    trainer.saver.on_change = lambda: said.append(trainer.doing) if current_thread() is main_thread() else None
    trainer.step = 2
    trainer.begin_save()
    assert said[-1] == "starting; saving step 2"
    assert disk.reached.wait(HELD_SECONDS)
    said.clear()
    is_ending.set()
    trainer.saver.finish()
    assert said == ["saving step 2", "starting"]


def _die_while_writing(rank: int, size: int, raw: dict[str, Any], run_dir: str) -> list[float]:
    """kill -9 of rank 1, from its saving thread, halfway through the shard of step 4."""

    def write_half(path: Path, entries: list[Entry], on_bytes: Any) -> Any:
        def count_bytes(count: int) -> None:
            on_bytes(count)
            if "step-4" in str(path):
                time.sleep(0.2)  # training goes on
                os.kill(os.getpid(), signal.SIGKILL)

        return write_file(path, entries, count_bytes)

    if rank == 1:
        writing.write_file = write_half
    return [record["loss"] for record in make_trainer(parse(raw), Path(run_dir), rank).run()]


@pytest.mark.slow
def test_a_kill_during_a_save_costs_no_older_checkpoint(data: Path, tmp_path: Path) -> None:
    """Resumed from step 2, the run has the losses of a run without the kill, to the bit."""
    job = tiny_job(data, 2, **EVERY)
    whole = column(train(job, tmp_path / "whole"))
    with pytest.raises(AssertionError):
        run_ranks(_die_while_writing, 2, job.model_dump(mode="json"), str(tmp_path / "killed"))
    names = {path.name for path in (tmp_path / "killed/checkpoints").iterdir()}
    assert names == {"step-2", ".step-4.partial"}
    ranks = train(job, tmp_path / "killed")
    assert column(ranks, "step") == [3, 4, 5, 6] and column(ranks) == whole[2:]
    assert _digests(tmp_path / "killed") == _digests(tmp_path / "whole")
