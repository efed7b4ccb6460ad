"""Saving: nothing is published before it is complete, however long that takes; failures."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch._C._distributed_c10d import HashStore

from mpctl.core.durable import remove
from mpctl.records.checkpoint.folder import list_checkpoints, partial_path, prunable, publish, recover
from mpctl.records.checkpoint.verify import find_damage
from mpctl.spec.load import parse
from mpctl.train.checkpoint import writer as saving
from mpctl.train.checkpoint.snapshot import Snapshot
from mpctl.train.checkpoint.tensor_file import Entry, write_file
from mpctl.train.checkpoint.writer import CheckpointWriter, PeersFailed, SaveFailed, StoreBarrier
from mpctl.train.transport.group import Group, Pending
from tests.ranks import run_ranks
from tests.train.checkpoint.shards import numbered
from tests.train.runtime.tiny import make_trainer, tiny_job

# ---------------------------------------------------------------- waiting at the store


@dataclass
class Clock:
    """Time that passes only while somebody sleeps; at `events` something happens."""

    events: dict[float, Any]
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in [at for at in self.events if at <= self.now]:
            self.events.pop(at)()


def _barriers(clock: Clock, patience: float) -> tuple[StoreBarrier, StoreBarrier]:
    store = HashStore()
    both = [StoreBarrier(store, patience, clock, clock.sleep) for _ in range(2)]
    for barrier in both:
        barrier.begin()
    return both[0], both[1]


def test_progress_renews_patience_and_silence_ends_it() -> None:
    """A writer moves at 8, 16, .. 96 s and is done at 104 s, all with a patience of 10 s; of the
    next save nothing is heard."""
    clock = Clock({})
    waiting, writing = _barriers(clock, 10)
    clock.events |= {8.0 * n: writing.progress for n in range(1, 13)}
    clock.events[104.0] = lambda: writing.announce("written/1")
    waiting.wait("written/1", whom="rank 1")
    assert 104 <= clock.now < 105
    began = clock.now
    waiting.begin()
    with pytest.raises(SaveFailed, match=r"timed out: no rank wrote .* for 10 s .* rank 1"):
        waiting.wait("written/1", whom="rank 1")
    assert 10 <= clock.now - began < 12


def test_less_patience_ends_waiting_that_has_begun() -> None:
    """As where training fails while its save waits for a rank (Saver.drain)."""
    clock = Clock({})
    waiting, _ = _barriers(clock, 300)
    clock.events[5.0] = lambda: setattr(waiting, "patience", 10)
    with pytest.raises(SaveFailed, match="no rank wrote anything for 10 s"):
        waiting.wait("written/1", whom="rank 1")
    assert 10 <= clock.now < 11


def test_a_failure_elsewhere_ends_waiting_with_its_words() -> None:
    clock = Clock({})
    waiting, writing = _barriers(clock, 10)
    clock.events[3.0] = lambda: writing.announce("failed", "no space")
    with pytest.raises(SaveFailed, match="gave up saving with its peers: no space"):
        waiting.wait("whole", whom="rank 0")
    assert clock.now < 4


def test_what_was_announced_does_not_stay_in_the_store() -> None:
    clock = Clock({})
    barrier, _ = _barriers(clock, 10)
    for _ in range(50):
        barrier.announce("whole")
        barrier.begin()
    assert barrier.store.num_keys() == 1


# ---------------------------------------------------------------- ranks that save


class Hasty(Group):
    """A group as on a GPU: a collective is enqueued, and the host continues at once."""

    def all_reduce(self, tensor: torch.Tensor, op: Any = "sum") -> torch.Tensor:
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor, op: Any = "sum") -> Pending:
        return Pending(tensor)


def _save_slowly(rank: int, size: int, raw: dict[str, Any], run_dir: str, slow: int, seconds: float) -> list[str]:
    """Save once, where one rank needs `seconds` to write; what is damaged when `save` returns."""
    trainer = make_trainer(parse(raw), Path(run_dir), rank)
    trainer.mesh = replace(trainer.mesh, world=Hasty(rank, size, None, "world"))

    def write_slowly(path: Path, entries: list[Entry], on_bytes: Any) -> Any:
        for _ in range(10):
            time.sleep(seconds / 10)
            on_bytes(0)
        return write_file(path, entries, on_bytes)

    if rank == slow:
        saving.write_file = write_slowly
    trainer.step = 1
    trainer.save()
    return [issue.message for issue in find_damage(Path(run_dir) / "checkpoints/step-1")]


def test_nothing_is_published_before_every_rank_has_written(data: Path, tmp_path: Path) -> None:
    """Collectives that do not wait: the manifest comes after the slowest shard all the same."""
    raw = tiny_job(data, 2).model_dump(mode="json")
    assert run_ranks(_save_slowly, 2, raw, str(tmp_path), 1, 1.0) == [[], []]
    folder = tmp_path / "checkpoints/step-1"
    written = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert written.pop("manifest.json") >= max(written.values())
    assert len(written) == 4


@pytest.mark.slow
def test_saving_may_take_longer_than_a_collective(data: Path, tmp_path: Path) -> None:
    """The replica that does not write waits three times `launch.timeout_seconds`."""
    raw = tiny_job(data, 1, 2, launch__timeout_seconds=1).model_dump(mode="json")
    assert run_ranks(_save_slowly, 2, raw, str(tmp_path), 0, 3.0) == [[], []]


def _fail(rank: int, size: int, raw: dict[str, Any], run_dir: str) -> list[str]:
    """Rank 1 may write 20,000 bytes a file; returns each rank's message."""
    trainer = make_trainer(parse(raw), Path(run_dir), rank)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    trainer.step = 1
    try:
        trainer.save()
    except SaveFailed as error:
        dist.barrier()
        return [str(error), *(path.name for path in Path(run_dir, "checkpoints").iterdir())]
    return []


def test_a_file_that_cannot_be_written_ends_the_save_of_all_ranks(data: Path, tmp_path: Path) -> None:
    """By the kernel: a file may not grow beyond a limit. The partial folder is removed."""
    raw = tiny_job(data, 2).model_dump(mode="json")
    first, second = run_ranks(_fail, 2, raw, str(tmp_path))
    assert first[1:] == [] and second[0] in first[0]
    assert "gave up saving with its peers" in first[0] and "gave up" not in second[0]
    for words in ("shard-1.safetensors", "File too large", "19.5 KiB", "none was saved before"):
        assert words in second[0]


def test_a_full_disk_is_reported_with_the_missing_bytes(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tiny_job(data, training__steps=1), tmp_path)
    list(trainer.run())

    def full(path: Path, entries: Any, on_bytes: Any) -> None:
        path.write_bytes(bytes(2048))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saving, "write_file", full)
    trainer.step = 2
    with pytest.raises(SaveFailed) as caught:
        trainer.save()
    for words in (
        "No space left on device: of ",
        " the first 2.0 KiB could be written, ",
        " more are needed; the last good checkpoint is step 1",
    ):
        assert words in str(caught.value)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


def test_a_rank_that_writes_into_a_removed_folder_names_the_first_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 fails, so rank 0 removes the folder; what rank 1 finds then is not a cause."""
    others, barrier = _barriers(Clock({}), 10)
    writer = CheckpointWriter(tmp_path, 1, {1: numbered(1), 2: numbered(2)}, barrier)
    folder, cause = partial_path(tmp_path, 4), "shard-2.safetensors: Input/output error"

    def write_removed(path: Path, entries: Any, on_bytes: Any) -> None:
        others.announce("failed", cause)
        remove(folder)
        path.write_bytes(b"")

    monkeypatch.setattr(saving, "write_file", write_removed)
    folder.mkdir()
    others.announce("open")
    with pytest.raises(PeersFailed, match=f"gave up saving with its peers: {cause}"):
        writer.write(Snapshot(4, parameters={}), lambda words: None)
    assert barrier.failure == cause


def test_a_folder_is_removed_after_the_reason_was_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is heard of rank 1: rank 0 gives up and says so, before rank 1 can miss the folder."""
    barrier, late = _barriers(Clock({}), 10)
    heard: list[str] = []

    def remove_partial(path: Path) -> None:
        if path.exists():
            heard.append(late.failure)
        remove(path)

    monkeypatch.setattr(saving, "remove", remove_partial)
    writer = CheckpointWriter(tmp_path, 0, {1: numbered(1)}, barrier)
    with pytest.raises(PeersFailed) as caught:
        writer.write(Snapshot(4), lambda words: None)
    assert heard == [str(caught.value)] and "no rank wrote anything for 10 s" in heard[0]
    assert list(tmp_path.iterdir()) == []


def test_it_reports_what_it_is_doing(data: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_job(data, training__steps=1), tmp_path)
    said: list[str] = []
    trainer.saver.on_change = lambda: said.append(trainer.doing)
    trainer.step = 7
    trainer.save()
    assert said[0] == "saving step 7" and said[-1] == "starting"
    last = [words for words in said if "written" in words][-1].removesuffix(" written")
    done, total = last.rpartition("saving step 7: ")[2].split(" of ")
    assert done == total


# ---------------------------------------------------------------- files


def test_a_file_is_hashed_while_it_is_written(tmp_path: Path) -> None:
    """And is read by safetensors to the bit: all dtypes, an empty tensor, more than a chunk."""
    torch.manual_seed(1)
    kinds = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    tensors = {name: torch.randn(3, 5).to(dtype) for name, dtype in kinds.items()}
    tensors |= {"empty": torch.zeros(0, 4), "long": torch.randn(5_000_000)}
    names = {dtype: name for name, dtype in kinds.items()}
    entries = [Entry(name, names[t.dtype], tuple(t.shape), lambda t=t: t) for name, t in tensors.items()]
    counts: list[int] = []
    written = write_file(tmp_path / "x.safetensors", entries, counts.append)
    held = (tmp_path / "x.safetensors").read_bytes()
    assert (written.bytes, written.sha256) == (len(held), hashlib.sha256(held).hexdigest())
    assert sum(counts) == sum(t.nbytes for t in tensors.values()) and max(counts) <= 1 << 24
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        assert all(torch.equal(file.get_tensor(name), t) for name, t in tensors.items())


def _checkpoint(folder: Path, words: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(words)
    return folder


class Crash(BaseException):
    """Simulates that the machine stops at this point."""


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_replacing_a_checkpoint_never_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """Dying after any number of renames, then once more before the next attempt cleans up."""
    final = _checkpoint(tmp_path / "step-3", "old")
    partial = _checkpoint(tmp_path / ".step-3.partial", "new")
    allowed, rename = iter(range(renames)), Path.rename

    def fragile(path: Path, target: Path) -> Path:
        if next(allowed, None) is None:
            raise Crash
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fragile)
        if renames < 2:
            with pytest.raises(Crash):
                publish(partial, final)
        else:
            publish(partial, final)
    ((step, found),) = list_checkpoints(tmp_path)
    assert (step, (found / "manifest.json").read_text()) == (3, "old" if renames < 2 else "new")
    recover(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
    assert (final / "manifest.json").read_text() == ("old" if renames < 2 else "new")


def test_which_checkpoints_are_pruned() -> None:
    steps = [5, 10, 15, 20, 25, 30, 33]
    assert prunable(steps, last=0, every=10) == [] and prunable([], last=3, every=0) == []
    assert prunable(steps, last=1, every=0) == [5, 10, 15, 20, 25, 30]
    assert prunable(steps, last=3, every=10) == [5, 15]
    assert prunable(steps, last=9, every=0) == []


def test_a_save_lasts_until_older_checkpoints_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks train on after it, and a collective would wait for rank 0. Removing needs 8 s a
    file, longer in all than their patience of 10 s."""
    clock = Clock({})
    barrier, waiting = _barriers(clock, 10)
    old = _checkpoint(tmp_path / "step-1", "old")
    for rank in range(4):
        (old / f"shard-{rank}").touch()
    said: list[str] = []
    moved: list[int] = []

    def remove_slowly(path: Path) -> None:
        if path.is_file():
            moved.append(waiting.store.add("1/progress", 0))
            clock.now += 8
            assert not waiting.store.check(["1/published"])
        remove(path)

    monkeypatch.setattr(saving, "remove", remove_slowly)
    writer = CheckpointWriter(tmp_path, 0, {0: numbered(0)}, barrier, keep_last=1)
    writer.write(Snapshot(2, parameters={}), said.append)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]
    assert len(moved) == 5 and moved == sorted({*moved})  # each file renewed their patience
    assert [words for words in said if words.startswith("saving step 2: removing shard-3 of step 1")]
    assert waiting.store.check(["1/published"])


def test_older_checkpoints_are_removed_after_a_new_one(data: Path, tmp_path: Path) -> None:
    keep = {
        "checkpoint__interval": 1,
        "checkpoint__keep_last": 2,
        "checkpoint__keep_every": 3,
        "checkpoint__asynchronous": False,
    }
    job = tiny_job(data, **keep, training__steps=7)
    (tmp_path / "job.json").write_text('{"its": "job"}')
    trainer, kept = make_trainer(job, tmp_path), []
    for _ in trainer.run():
        kept.append([step for step, _ in list_checkpoints(tmp_path / "checkpoints")])
    assert kept[:-1] == [[], [1], [1, 2], [2, 3], [3, 4], [3, 4, 5]]
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step-3", "step-6", "step-7"}
    assert all(find_damage(folder) == [] for _, folder in list_checkpoints(tmp_path / "checkpoints"))
    copy = tmp_path / "checkpoints/step-7/job.json"
    assert json.loads(copy.read_text()) == {"its": "job"}
