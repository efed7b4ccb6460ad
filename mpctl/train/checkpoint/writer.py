"""Writing a checkpoint from tensors in host memory: the ranks of the first replicas write a shard
each (replicas.py), rank 0 publishes.

RUN/checkpoints/step-N appears by renaming `.step-N.partial` once all its files are on the disk, the
manifest last, so that a process or a machine that dies while saving never destroys an older
checkpoint. A checkpoint also has copies of RUN/job.json and RUN/plan.json, from which a run can be
resumed whose files were damaged.

Ranks wait for each other at the run's key-value store, for as long as one of them makes progress,
and never in a collective: NCCL only enqueues an all-reduce, so the host continues before its peers
have joined, and a collective may last `launch.timeout_seconds`, while writing a large checkpoint
takes longer. Saving may therefore run in a thread during training (saver.py).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch._C._distributed_c10d import Store

from mpctl.core.durable import remove, sync_folder, write_whole
from mpctl.core.errors import RunFailed
from mpctl.core.units import bytes_text
from mpctl.records.checkpoint.folder import PRUNED, hidden_sibling, list_checkpoints, partial_path, prunable, publish
from mpctl.records.checkpoint.manifest import Manifest, ShardFile, ShardRecord
from mpctl.train.checkpoint.snapshot import Snapshot
from mpctl.train.checkpoint.tensor_file import write_file

OnProgress = Callable[[str], None]
RECORDS_SHARE = 0.01
"""The least bytes that headers and records add to those of the tensors."""
OWN = 0o755
"""The mode of a checkpoint's folder, less the umask: its job may be resumed from."""
PATIENCE = 300.0
SHORTEST, GROWTH, LONGEST = 0.002, 1.2, 0.5  # seconds between two polls of the store
PROGRESS_SECONDS = 0.2
FAILED, PROGRESS = "failed", "progress"


class SaveFailed(RunFailed):
    """A checkpoint could not be written."""


class PeersFailed(SaveFailed):
    """A checkpoint could not be written because of another rank."""

    is_secondary = True

    @classmethod
    def because(cls, why: str) -> PeersFailed:
        """The error of a rank that read why another one gave up."""
        return cls(f"gave up saving with its peers: {why}")


@dataclass
class StoreBarrier:
    """A barrier as one rank uses it; every rank calls `begin` once a save. A save is given up only
    when no rank has written anything for `patience` seconds.

    The keys of save number n are "n/NAME": whatever is announced, "n/failed" with the reason, and
    the counter "n/progress".

    store: torch.distributed's, shared by all ranks. patience: seconds without progress after which
    waiting ends; it may change meanwhile. clock and sleep are arguments so that tests need not wait.
    moved: when this rank last made or noticed progress, by `clock`.
    """

    store: Store
    patience: float = PATIENCE
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    number: int = 0
    reported: float = float("-inf")
    moved: float = float("-inf")
    announced: dict[int, list[str]] = field(default_factory=dict)

    def begin(self) -> None:
        """Begin the next save. The keys of this rank in the save before the last, which no rank
        reads any more, are removed from the store."""
        self.number += 1
        for key in self.announced.pop(self.number - 2, ()):
            self.store.delete_key(key)

    def announce(self, name: str, words: str = "") -> None:
        """Announce to every rank that `name` has happened; words: the reason of a failure."""
        self.store.set(self._key(name), words)
        self.announced.setdefault(self.number, []).append(self._key(name))

    def progress(self) -> None:
        """Restart the timeout of all that wait; asks the store a few times a second at most."""
        self.moved = self.clock()
        if self.moved - self.reported >= PROGRESS_SECONDS:
            self.reported = self.moved
            self.store.add(self._key(PROGRESS), 1)

    @property
    def is_silent(self) -> bool:
        """Whether there was no progress for longer than `patience`."""
        return self.clock() - self.moved > self.patience

    @property
    def failure(self) -> str:
        """Why a rank gave up this save; empty while none did."""
        key = self._key(FAILED)
        return self.store.get(key).decode(errors="replace") if self.store.check([key]) else ""

    def wait(self, name: str, *, whom: str) -> None:
        """Return once `name` was announced. whom: awaited rank and action, for an error message.

        Raises PeersFailed when a rank announced that it failed, or when patience ran out.
        """
        progress, pause = -1, SHORTEST
        while not self.store.check([self._key(name)]):
            if why := self.failure:
                raise PeersFailed.because(why)
            now = self.store.add(self._key(PROGRESS), 0)
            if now != progress:
                progress, self.moved = now, self.clock()
            elif self.is_silent:
                raise PeersFailed(
                    f"saving timed out: no rank wrote anything for {self.patience:g} s while waiting for {whom}"
                )
            self.sleep(pause)
            pause = min(GROWTH * pause, LONGEST)  # at most a fifth longer than was waited so far

    def _key(self, name: str) -> str:
        return f"{self.number}/{name}"


@dataclass
class CheckpointWriter:
    """One rank's part in writing checkpoints.

    root: RUN/checkpoints. rank: this one; shards: the shard of each rank that writes one.
    documents: texts to be copied into every checkpoint, by file name. total_bytes: of the tensors
    of a checkpoint, all shards together. keep_last, keep_every: which checkpoints stay: so many of
    the newest, 0 for all, and those of each multiple of keep_every, 0 for no more.
    """

    root: Path
    rank: int
    shards: Mapping[int, ShardFile]
    barrier: StoreBarrier
    documents: Mapping[str, str] = field(default_factory=dict)
    total_bytes: int = 0
    keep_last: int = 0
    keep_every: int = 0

    @property
    def is_writer(self) -> bool:
        return self.rank in self.shards

    def write(self, snapshot: Snapshot, on_progress: OnProgress) -> None:
        """Write this rank's shard of `step-N`; returns when the checkpoint is published. Every rank
        calls it after `barrier.begin`, those that write nothing with an empty snapshot.

        on_progress: called with a text such as `saving step 3: 20 MiB of 1 GiB written`. Raises
        SaveFailed when a file cannot be written, on this rank or on another.
        """
        folder, rank = partial_path(self.root, snapshot.step), self.rank
        on_progress(f"saving step {snapshot.step}")
        try:
            if rank == 0:
                self._writing(folder, self._make_room)
                self.barrier.announce("open")
            self.barrier.wait("open", whom="rank 0 to make the folder")
            if snapshot.parameters is not None:
                self._write_shard(folder, snapshot, on_progress)
                self.barrier.announce(_written(rank))
            if rank == 0:
                self._publish(folder, snapshot)
                self._prune(snapshot.step, on_progress)
                self.barrier.announce("published")
            self.barrier.wait("published", whom="rank 0 to publish the checkpoint")
        except SaveFailed as error:
            if rank == 0:
                if not self.barrier.failure:  # first, so that no rank blames itself for a file that is gone
                    self.barrier.announce(FAILED, str(error))
                remove(folder)
            raise

    def _make_room(self, folder: Path) -> None:
        """Make the folder of the checkpoint, empty. Raises SaveFailed where the disk has no room
        for the checkpoint; nothing was written then."""
        remove(folder)
        folder.parent.mkdir(mode=OWN, parents=True, exist_ok=True)
        folder.mkdir(mode=OWN)
        sync_folder(folder.parent)
        usage = shutil.disk_usage(self.root)
        needed = self.total_bytes + int(RECORDS_SHARE * self.total_bytes)
        if usage.total and usage.free < needed:  # 0: a file system that does not report it
            words = (
                f"{self.root}: {bytes_text(needed)} are needed and {bytes_text(usage.free)} are "
                f"free, {bytes_text(needed - usage.free)} are missing"
            )
            raise SaveFailed(_with_last_good(self.root, words))

    def _write_shard(self, folder: Path, snapshot: Snapshot, on_progress: OnProgress) -> None:
        shard, parameters = self.shards[self.rank], snapshot.parameters or {}
        done, total = 0, sum(entry.bytes for entry in snapshot.entries)

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            step, written = snapshot.step, f"{bytes_text(done)} of {bytes_text(total)} written"
            on_progress(f"saving step {step}: {written}")
            self.barrier.progress()

        def write(path: Path) -> None:
            file = write_file(path, snapshot.entries, on_bytes)
            record = ShardRecord.of(file, parameters, snapshot.frozen)
            record.write(shard.record_path(folder))

        self._writing(shard.path(folder), write, needed=total)

    def _publish(self, folder: Path, snapshot: Snapshot) -> None:
        """Write the manifest once all shards are written, and give the folder its final name."""
        for rank in self.shards:
            self.barrier.wait(_written(rank), whom=f"rank {rank} to write its shard")
        manifest = Manifest(
            step=snapshot.step, shards=list(self.shards.values()), save=os.urandom(8).hex(), **snapshot.tables
        )

        def write(folder: Path) -> None:
            for name, text in self.documents.items():
                write_whole(folder / name, text, mode=0o644)
            manifest.write(folder)
            sync_folder(folder)
            publish(folder, self.root / f"step-{snapshot.step}")

        self._writing(folder, write)

    def _writing(self, path: Path, write: Callable[[Path], None], *, needed: int = 0) -> None:
        """Write something; a failure is announced to all ranks, and its half-written file removed.
        After another rank's failure, when rank 0 removes the folder, it is not a cause. needed: bytes
        of the file, for the message. Raises SaveFailed."""
        try:
            write(path)
        except SaveFailed as error:
            self.barrier.announce(FAILED, str(error))
            raise
        except OSError as error:
            if why := self.barrier.failure:
                raise PeersFailed.because(why) from None
            words = _with_last_good(self.root, _why(path, error, needed))
            if path.is_file():  # its space lets the record of the failure be written
                path.unlink(missing_ok=True)
            self.barrier.announce(FAILED, words)
            raise SaveFailed(words) from None

    def _prune(self, saved_step: int, on_progress: OnProgress) -> None:
        """Remove checkpoints that need not stay after that of `saved_step`, each renamed first, so
        that no checkpoint's name is ever that of half of one. Every rank waits: each file that is
        removed counts as progress."""
        saved = list_checkpoints(self.root)
        steps = [step for step, _ in saved]
        for step in prunable(steps, last=self.keep_last, every=self.keep_every):
            path = dict(saved)[step]
            try:
                pruned = path.rename(hidden_sibling(path, PRUNED))
                files = list(pruned.iterdir())
            except OSError as error:
                print(f"{path} could not be removed: {error}", flush=True)
                continue
            for file in files:
                on_progress(f"saving step {saved_step}: removing {file.name} of step {step}")
                remove(file)
                self.barrier.progress()
            remove(pruned)


def _written(rank: int) -> str:
    return f"written/{rank}"


def _why(path: Path, error: OSError, needed: int) -> str:
    """Name the file that could not be written, the error, and the missing space if known."""
    words = f"{path}: {error.strerror or error}"
    if not needed:
        return words
    done = path.stat().st_size if path.is_file() else 0
    return (
        f"{words}: of {bytes_text(needed)} the first {bytes_text(done)} could be written, "
        f"{bytes_text(max(0, needed - done))} more are needed"
    )


def _with_last_good(root: Path, words: str) -> str:
    saved = list_checkpoints(root)
    good = f"the last good checkpoint is step {saved[-1][0]}" if saved else "none was saved before"
    return f"the checkpoint could not be saved: {words}; {good}"
