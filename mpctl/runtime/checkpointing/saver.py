"""Writing a checkpoint: every rank takes part, one replica of each shard writes, rank 0 publishes.

RUN/checkpoints/step-N appears by renaming `.step-N.partial` once all its files are on the disk, so
that a process or a machine that dies while saving never costs an older checkpoint. Ranks wait for
each other at the store (store_barrier.py), never in a collective: saving may take as long as it
needs. The slices of ZeRO are gathered before anything is written.

A checkpoint also holds copies of RUN/job.json and RUN/plan.json: a run whose own files were damaged
can be resumed from them. What the files of a shard mean: loader.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from mpctl.durable import remove, sync_folder
from mpctl.rundir.checkpoints import (
    PRUNED,
    REPLACED,
    hidden_sibling,
    list_checkpoints,
    partial_path,
    prunable,
)
from mpctl.rundir.shards import MANIFEST, SCHEMA, shard_path
from mpctl.runtime.checkpointing.shard_content import (
    State,
    file_entries,
    gather_states,
    shard_record,
)
from mpctl.runtime.checkpointing.store_barrier import FAILED, SaveFailed, StoreBarrier
from mpctl.runtime.loss_scale import LossScale
from mpctl.runtime.mesh import Mesh
from mpctl.runtime.optimizer import Optimizer
from mpctl.runtime.process import write_json
from mpctl.units import bytes_text
from mpctl.weights.files import write_file

Say = Callable[[str], None]


@dataclass(frozen=True)
class KeepPolicy:
    """Which checkpoints stay: the `last` newest ones, 0 for all, and those of every step that is a
    multiple of `every`, 0 for none more (checkpoint.keep_last, checkpoint.keep_every)."""

    last: int = 0
    every: int = 0


@dataclass
class Saver:
    """One rank's part in saving a run.

    root: RUN/checkpoints. documents: texts to be copied into every checkpoint, by file name.
    """

    root: Path
    mesh: Mesh
    barrier: StoreBarrier
    documents: Mapping[str, str] = field(default_factory=dict)
    keep: KeepPolicy = KeepPolicy()

    def save(
        self,
        step: int,
        names: Mapping[Tensor, str],
        optimizer: Optimizer,
        *,
        scale: LossScale | None = None,
        say: Say = lambda words: None,
    ) -> Path:
        """Write `step-N` after `step` steps; every rank calls it and returns when it is published.

        names: of the parameters that this rank's shard is to hold. scale: of the loss, in fp16.
        say: is told what this rank is doing. Raises SaveFailed when a file cannot be written, on
        this rank or on another.
        """
        folder, rank = partial_path(self.root, step), self.mesh.rank
        say(f"saving step {step}")
        self.barrier.begin()
        try:
            if rank == 0:
                self._writing(folder, _make_empty)
                self.barrier.announce("open")
            self.barrier.wait("open", whom="rank 0 to make the folder")
            is_writer = self.mesh.writes_checkpoint
            states = gather_states(names, optimizer, is_writer=is_writer)
            if is_writer:
                self._write_shard(folder, step, names, states, optimizer, say)
                self.barrier.announce(_written(rank))
            if rank == 0:
                self._publish(folder, step, scale)
                self.barrier.announce("whole")
            self.barrier.wait("whole", whom="rank 0 to publish the checkpoint")
        except SaveFailed:
            if rank == 0:
                remove(folder)
            raise
        if rank == 0:
            self._prune()
        return self.root / f"step-{step}"

    def _write_shard(
        self,
        folder: Path,
        step: int,
        names: Mapping[Tensor, str],
        states: Mapping[Tensor, State],
        optimizer: Optimizer,
        say: Say,
    ) -> None:
        mesh = self.mesh
        path = shard_path(folder, mesh.pp.rank * mesh.tp.size + mesh.tp.rank)
        entries, done = file_entries(names, states), 0
        total = sum(entry.bytes for entry in entries)

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            say(f"saving step {step}: {bytes_text(done)} of {bytes_text(total)} written")
            self.barrier.progress()

        def write(path: Path) -> None:
            file = write_file(path, entries, on_bytes)
            record = {"bytes": file.bytes, "sha256": file.sha256}
            write_json(path.with_suffix(".json"), record | shard_record(names, states, optimizer))

        self._writing(path, write, needed=total)

    def _publish(self, folder: Path, step: int, scale: LossScale | None) -> None:
        """Write the manifest once all shards are written, and give the folder its final name."""
        tp, stages = self.mesh.tp.size, self.mesh.pp.size
        for rank in _writers(self.mesh):
            self.barrier.wait(_written(rank), whom=f"rank {rank} to write its shard")
        manifest: dict[str, Any] = {"schema": SCHEMA, "step": step, "shards": tp * stages, "tp": tp}
        if scale is not None:
            manifest["loss_scale"] = scale.state()

        def write(folder: Path) -> None:
            for name, text in self.documents.items():
                (folder / name).write_text(text, "utf-8")
            write_json(folder / MANIFEST, manifest)
            sync_folder(folder)
            publish(folder, self.root / f"step-{step}")

        self._writing(folder, write)

    def _writing(self, path: Path, write: Callable[[Path], None], *, needed: int = 0) -> None:
        """Write something; a failure is announced to all ranks, and its half-written file removed.
        needed: bytes of the file, for the message. Raises SaveFailed."""
        try:
            write(path)
        except OSError as error:
            words = _why(self.root, path, error, needed)
            if path.is_file():  # its space lets the account of the failure be written
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
                doomed = path.rename(hidden_sibling(path, PRUNED))
            except OSError as error:
                print(f"{path} could not be removed: {error}", flush=True)
                continue
            remove(doomed)


def publish(folder: Path, final: Path) -> None:
    """Rename a complete checkpoint into place; one of the same step is removed only after that."""
    replaced = hidden_sibling(final, REPLACED)
    if final.exists():
        remove(replaced)
        final.rename(replaced)
    folder.rename(final)
    sync_folder(final.parent)
    remove(replaced)


def _make_empty(folder: Path) -> None:
    remove(folder)
    folder.mkdir(parents=True)


def _written(rank: int) -> str:
    return f"written/{rank}"


def _writers(mesh: Mesh) -> list[int]:
    """Ranks that write a shard: those of the first replica."""
    topology = mesh.topology
    coords = [topology.coords(rank) for rank in range(topology.world_size)]
    return [rank for rank, c in enumerate(coords) if c["dp"] == c["cp"] == 0]


def _why(root: Path, path: Path, error: OSError, needed: int) -> str:
    """What could not be written, how much was missing, and what is still there."""
    words = f"{path}: {error.strerror or error}"
    if needed:
        done = path.stat().st_size if path.is_file() else 0
        words += (
            f": of {bytes_text(needed)} the first {bytes_text(done)} could be written, "
            f"{bytes_text(max(0, needed - done))} more are needed"
        )
    saved = list_checkpoints(root)
    good = f"the last good checkpoint is step {saved[-1][0]}" if saved else "none was saved before"
    return f"the checkpoint could not be saved: {words}; {good}"
