"""Writing a checkpoint from tensors in host memory: one replica of each shard writes, rank 0
publishes.

RUN/checkpoints/step-N appears by renaming `.step-N.partial` once all its files are on the disk, the
manifest last, so that a process or a machine that dies while saving never costs an older
checkpoint. Ranks wait for each other at the store (store_barrier.py), never in a collective: saving
may take as long as it needs, and may run in a thread beside training (saver.py).

A checkpoint also has copies of RUN/job.json and RUN/plan.json: a run whose own files were damaged
can be resumed from them. What the files of a shard mean: loader.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpctl.durable import remove, sync_folder, write_whole
from mpctl.rundir.checkpoints import (
    PRUNED,
    REPLACED,
    hidden_sibling,
    list_checkpoints,
    partial_path,
    prunable,
)
from mpctl.rundir.shards import MANIFEST, SCHEMA, shard_path
from mpctl.runtime.checkpointing.shard_content import Snapshot
from mpctl.runtime.checkpointing.store_barrier import FAILED, SaveFailed, StoreBarrier
from mpctl.runtime.mesh import Mesh
from mpctl.runtime.process import write_json
from mpctl.units import bytes_text
from mpctl.weights.files import write_file

OnProgress = Callable[[str], None]
RECORDS_SHARE = 0.01
"""What headers and records add to the bytes of the tensors, at least."""


@dataclass(frozen=True)
class KeepPolicy:
    """Which checkpoints stay: the `last` newest ones, 0 for all, and those of every step that is a
    multiple of `every`, 0 for none more (checkpoint.keep_last, checkpoint.keep_every)."""

    last: int = 0
    every: int = 0


@dataclass
class CheckpointWriter:
    """One rank's part in writing checkpoints.

    root: RUN/checkpoints. documents: texts to be copied into every checkpoint, by file name.
    total_bytes: of the tensors of a whole checkpoint, all shards together. on_progress: called with
    what is being written, `saving step 3: 20 MiB of 1 GiB written`.
    """

    root: Path
    mesh: Mesh
    barrier: StoreBarrier
    documents: Mapping[str, str] = field(default_factory=dict)
    keep: KeepPolicy = KeepPolicy()
    total_bytes: int = 0
    on_progress: OnProgress = lambda words: None

    def write(self, snapshot: Snapshot) -> None:
        """Write this rank's shard of `step-N`; returns when the checkpoint is published. Every rank
        calls it, those that write nothing with an empty snapshot.

        Raises SaveFailed when a file cannot be written, on this rank or on another.
        """
        folder, rank = partial_path(self.root, snapshot.step), self.mesh.rank
        self.on_progress(f"saving step {snapshot.step}")
        self.barrier.begin()
        try:
            if rank == 0:
                self._writing(folder, self._make_room)
                self.barrier.announce("open")
            self.barrier.wait("open", whom="rank 0 to make the folder")
            if snapshot.record is not None:
                self._write_shard(folder, snapshot)
                self.barrier.announce(_written(rank))
            if rank == 0:
                self._publish(folder, snapshot)
                self.barrier.announce("whole")
            self.barrier.wait("whole", whom="rank 0 to publish the checkpoint")
        except SaveFailed:
            if rank == 0:
                remove(folder)
            raise
        if rank == 0:
            self._prune()

    def _make_room(self, folder: Path) -> None:
        """Make the folder of the checkpoint, empty. Raises SaveFailed where the disk has no room
        for the checkpoint; nothing was written then."""
        remove(folder)
        folder.mkdir(parents=True)
        sync_folder(folder.parent)
        usage = shutil.disk_usage(self.root)
        needed = self.total_bytes + int(RECORDS_SHARE * self.total_bytes)
        if usage.total and usage.free < needed:  # 0: a file system that does not report it
            words = (
                f"{self.root}: {bytes_text(needed)} are needed and {bytes_text(usage.free)} are "
                f"free, {bytes_text(needed - usage.free)} are missing"
            )
            raise SaveFailed(_with_last_good(self.root, words))

    def _write_shard(self, folder: Path, snapshot: Snapshot) -> None:
        path = shard_path(folder, self.mesh.pp.rank * self.mesh.tp.size + self.mesh.tp.rank)
        done, total = 0, sum(entry.bytes for entry in snapshot.entries)

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            step, written = snapshot.step, f"{bytes_text(done)} of {bytes_text(total)} written"
            self.on_progress(f"saving step {step}: {written}")
            self.barrier.progress()

        def write(path: Path) -> None:
            file = write_file(path, snapshot.entries, on_bytes).as_record()
            write_json(path.with_suffix(".json"), {**file, **(snapshot.record or {})})

        self._writing(path, write, needed=total)

    def _publish(self, folder: Path, snapshot: Snapshot) -> None:
        """Write the manifest once all shards are written, and give the folder its final name."""
        tp, stages = self.mesh.tp.size, self.mesh.pp.size
        for rank in _writers(self.mesh):
            self.barrier.wait(_written(rank), whom=f"rank {rank} to write its shard")
        manifest: dict[str, Any] = {
            "schema": SCHEMA,
            "step": snapshot.step,
            "shards": tp * stages,
            "tp": tp,
            "save": os.urandom(8).hex(),
        }
        if snapshot.loss_scale is not None:
            manifest["loss_scale"] = snapshot.loss_scale
        if snapshot.fp8:
            manifest["fp8"] = snapshot.fp8

        def write(folder: Path) -> None:
            for name, text in self.documents.items():
                write_whole(folder / name, text)
            write_json(folder / MANIFEST, manifest)
            sync_folder(folder)
            publish(folder, self.root / f"step-{snapshot.step}")

        self._writing(folder, write)

    def _writing(self, path: Path, write: Callable[[Path], None], *, needed: int = 0) -> None:
        """Write something; a failure is announced to all ranks, and its half-written file removed.
        needed: bytes of the file, for the message. Raises SaveFailed."""
        try:
            write(path)
        except SaveFailed as error:
            self.barrier.announce(FAILED, str(error))
            raise
        except OSError as error:
            words = _with_last_good(self.root, _why(path, error, needed))
            if path.is_file():  # its space lets the record of the failure be written
                path.unlink()
            self.barrier.announce(FAILED, words)
            raise SaveFailed(words) from None

    def _prune(self) -> None:
        """Remove checkpoints that need not stay, each renamed first, so that no name of a
        checkpoint ever stands for half of one."""
        saved = list_checkpoints(self.root)
        steps = [step for step, _ in saved]
        for step in prunable(steps, last=self.keep.last, every=self.keep.every):
            path = dict(saved)[step]
            try:
                pruned = path.rename(hidden_sibling(path, PRUNED))
            except OSError as error:
                print(f"{path} could not be removed: {error}", flush=True)
                continue
            remove(pruned)


def publish(folder: Path, final: Path) -> None:
    """Rename a complete checkpoint to its final name; one of the same step is removed only after
    that."""
    replaced = hidden_sibling(final, REPLACED)
    if final.exists():
        remove(replaced)
        final.rename(replaced)
    folder.rename(final)
    sync_folder(final.parent)
    remove(replaced)


def _written(rank: int) -> str:
    return f"written/{rank}"


def _writers(mesh: Mesh) -> list[int]:
    """Ranks that write a shard: those of the first replica."""
    topology = mesh.topology
    coords = [topology.coords(rank) for rank in range(topology.world_size)]
    return [rank for rank, c in enumerate(coords) if c["dp"] == c["cp"] == 0]


def _why(path: Path, error: OSError, needed: int) -> str:
    """What could not be written, and how much was missing."""
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
