"""Writing a checkpoint: every rank takes part, one replica of each shard writes, rank 0 publishes.

RUN/checkpoints/step-N appears by renaming `.step-N.partial` once all its files are on the disk, so
that a process or a machine that dies while saving never costs an older checkpoint. Ranks wait for
each other at the store (store_barrier.py), never in a collective: saving may take as long as it
needs. The slices of ZeRO are gathered before anything is written.

A checkpoint also holds copies of RUN/job.json and RUN/plan.json: a run whose own files were damaged
can be resumed from them. What the files of a shard mean: checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from mpctl.durable import remove, sync_folder
from mpctl.kernels.parameters import shard_of
from mpctl.rundir.checkpoints import (
    PRUNED,
    REPLACED,
    hidden_sibling,
    list_checkpoints,
    partial_path,
    prunable,
)
from mpctl.rundir.shards import MANIFEST, SCHEMA, shard_path
from mpctl.runtime.checkpointing.store_barrier import FAILED, SaveFailed, StoreBarrier
from mpctl.runtime.loss_scale import LossScale
from mpctl.runtime.mesh import Mesh
from mpctl.runtime.optimizer import Optimizer
from mpctl.runtime.process import write_json
from mpctl.units import bytes_text
from mpctl.weights.files import DTYPES, Entry, write_file

Say = Callable[[str], None]
State = dict[str, Tensor]
SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class Saver:
    """One rank's part in saving a run.

    root: RUN/checkpoints. documents: texts to be kept in every checkpoint, by file name. keep_last,
    keep_every: as in spec/training.py.
    """

    root: Path
    mesh: Mesh
    barrier: StoreBarrier
    documents: Mapping[str, str] = field(default_factory=dict)
    keep_last: int = 0
    keep_every: int = 0

    def save(
        self, step: int, names: Mapping[Tensor, str], optimizer: Optimizer, *,
        scale: LossScale | None = None, say: Say = lambda words: None,
    ) -> Path:  # fmt: skip
        """Write `step-N` after `step` steps; every rank calls it and returns when it is whole.

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
            held = _held(names, optimizer, is_kept=self.mesh.is_model_writer)
            if self.mesh.is_model_writer:
                self._write_shard(folder, step, names, held, optimizer, say)
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
        self, folder: Path, step: int, names: Mapping[Tensor, str],
        held: dict[Tensor, State], optimizer: Optimizer, say: Say,
    ) -> None:  # fmt: skip
        mesh = self.mesh
        path = shard_path(folder, mesh.pp.rank * mesh.tp.size + mesh.tp.rank)
        entries, done = _entries(names, held), 0
        total = sum(entry.bytes for entry in entries)

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            say(f"saving step {step}: {bytes_text(done)} of {bytes_text(total)} written")
            self.barrier.progress()

        def write(path: Path) -> None:
            file = write_file(path, entries, on_bytes)
            record = {"bytes": file.bytes, "sha256": file.sha256}
            write_json(path.with_suffix(".json"), record | _places(names, held, optimizer))

        self._writing(path, write, needed=total)

    def _publish(self, folder: Path, step: int, scale: LossScale | None) -> None:
        """Once all shards are written: the manifest, and the name by which they are found."""
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
        """Write something; a failure is told to all ranks, and its half-written file removed."""
        try:
            write(path)
        except OSError as error:
            words = _why(self.root, path, error, needed)
            if path.is_file():  # its space lets the account of the failure be written
                path.unlink()
            self.barrier.announce(FAILED, words)
            raise SaveFailed(words) from None

    def _prune(self) -> None:
        """Remove what need not be kept, each first renamed so that half of it is no checkpoint."""
        saved = list_checkpoints(self.root)
        steps = [step for step, _ in saved]
        for step in prunable(steps, last=self.keep_last, every=self.keep_every):
            path = dict(saved)[step]
            try:
                doomed = path.rename(hidden_sibling(path, PRUNED))
            except OSError as error:
                print(f"{path} could not be removed: {error}", flush=True)
                continue
            remove(doomed)


def publish(folder: Path, final: Path) -> None:
    """Rename a whole checkpoint into place; one of the same step goes only after that."""
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
    coords = ((rank, topology.coords(rank)) for rank in range(topology.world_size))
    return [rank for rank, at in coords if at["dp"] == at["cp"] == 0]


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


def _held(
    names: Mapping[Tensor, str], optimizer: Optimizer, *, is_kept: bool
) -> dict[Tensor, State]:
    """What a shard holds of each parameter, the frozen ones last; of slices the replicas gather it
    bucket by bucket, and only who writes keeps it."""
    found: dict[Tensor, State] = {}
    for parameter, state in optimizer.states():
        if is_kept and parameter in names:
            found[parameter] = {field: _alone(tensor) for field, tensor in state.items()}
    frozen: dict[Tensor, Tensor] = dict(optimizer.frozen_values())
    for other in names if is_kept else ():
        if other not in optimizer.trained:
            found[other] = {"value": _alone(frozen.get(other, other).detach())}
    return found


def _alone(tensor: Tensor) -> Tensor:
    """Without the rest of the bucket that it may lie in, whose memory would be kept."""
    is_view = tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.to("cpu", copy=True) if is_view else tensor.contiguous()


def _entries(names: Mapping[Tensor, str], held: Mapping[Tensor, State]) -> list[Entry]:
    """The tensors of a shard, `NAME/FIELD`: widest type first, which aligns them, then by name."""
    tensors = {
        f"{names[parameter]}/{field}": tensor
        for parameter, state in held.items() for field, tensor in state.items()
    }  # fmt: skip
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    return [
        Entry(name, SAFETENSORS_NAMES[tensor.dtype], tuple(tensor.shape), partial(_same, tensor))
        for name, tensor in ordered
    ]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _places(
    names: Mapping[Tensor, str], held: Mapping[Tensor, State], optimizer: Optimizer
) -> dict[str, Any]:
    """The record of a shard: of each parameter its full shape, split dimension, blocks kept and,
    where it has moments, the updates that they have seen; `frozen`: those without."""
    places: dict[str, Any] = {}
    for parameter in held:
        shard = shard_of(parameter)
        blocks = [[block.start, block.stop] for block in shard.blocks]
        place = {"shape": list(shard.shape), "dim": shard.dim, "blocks": blocks}
        if parameter in optimizer.trained:
            place["updates"] = optimizer.updates_of(parameter)
        places[names[parameter]] = place
    frozen = [names[parameter] for parameter, state in held.items() if state.keys() == {"value"}]
    return {"parameters": places, **({"frozen": frozen} if frozen else {})}
