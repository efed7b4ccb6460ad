"""Saving while training goes on: a copy of this rank's state, then a thread that writes it.

A save has two parts. The snapshot is taken between two steps: slices of ZeRO are gathered bucket by
bucket, and the ranks that write (those of the first replica) copy values and moments to host
memory; from a GPU they only start to, and the copies go on beside the next step
(shard_content.py). That is all that training waits for. Writing (writer.py: hash, write,
synchronise, publish) then goes on in a thread, with no collective, for as long as it takes. With
`checkpoint.asynchronous = false` both parts happen between two steps and nothing is copied.

One save is in flight at a time: the next one waits for it, and so does the end of a run. The
failure of a save is raised by the next `save` or `finish`; the trainer asks `has_failed` once a
step and lets all ranks stop after the same one.

Memory: the copies are kept for the next save, so a rank that writes needs the bytes of its shard in
host memory once more (estimate/checkpoint.py: snapshot_bytes).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread

from torch import Tensor

from mpctl.estimate.checkpoint import checkpoint_bytes
from mpctl.layout.job_layout import JobLayout
from mpctl.rundir.checkpoints import DOCUMENTS
from mpctl.rundir.rank_files import SaveTimes, StepRecord
from mpctl.rundir.shards import Fp8Histories
from mpctl.runtime.checkpointing.shard_content import HostCopies, Snapshot, take_snapshot
from mpctl.runtime.checkpointing.store_barrier import FAILED, PATIENCE, SaveFailed, StoreBarrier
from mpctl.runtime.checkpointing.writer import CheckpointWriter, KeepPolicy
from mpctl.runtime.loss_scale import LossScale
from mpctl.runtime.mesh import Mesh, checkpoint_store
from mpctl.runtime.optimizer import Optimizer

SETTLE_PATIENCE = 10.0
"""Seconds without progress after which a rank that has failed no longer waits for its save."""


@dataclass
class SaveInFlight:
    """A save that a thread is writing. ended: when the checkpoint was published or given up, by
    `clock`; failure: why it was given up."""

    step: int
    began: float
    stall_seconds: float = 0.0
    ended: float | None = None
    failure: BaseException | None = None
    thread: Thread | None = None


@dataclass
class Saver:
    """One rank's part in saving a run.

    asynchronous: whether a thread writes. progress: what is being written, `saving step 3: 20 MiB
    of 1 GiB written`, empty while nothing is; on_change: called when that text changes. histories:
    what the table of fp8 scales has seen, asked at each save. is_awaited: whether this rank's
    training waits for a save now. saved: steps of which there is a checkpoint, the one being
    written included. times: of the saves that ended; failure: why one was given up.
    """

    writer: CheckpointWriter
    asynchronous: bool = True
    on_change: Callable[[], None] = lambda: None
    histories: Callable[[], Fp8Histories] = dict
    clock: Callable[[], float] = time.perf_counter
    progress: str = ""
    is_awaited: bool = False
    saved: set[int] = field(default_factory=set)
    times: list[SaveTimes] = field(default_factory=list)
    failure: BaseException | None = None
    copies: HostCopies = field(default_factory=HostCopies)
    current: SaveInFlight | None = None
    stalled: float = 0.0
    recorded: int = 0

    @classmethod
    def of(cls, run_dir: Path, layout: JobLayout, mesh: Mesh, copies: HostCopies) -> Saver:
        """The saver of one rank of a run; every rank makes one. Rank 0 reads the run's own
        documents now, to copy them into every checkpoint."""
        job = layout.job
        store = checkpoint_store(mesh.rank, mesh.world.size)
        barrier = StoreBarrier(store, patience=max(PATIENCE, job.launch.timeout_seconds))
        paths = [run_dir / name for name in DOCUMENTS] if mesh.rank == 0 else []
        documents = {path.name: path.read_text("utf-8") for path in paths if path.is_file()}
        keep = KeepPolicy(job.checkpoint.keep_last, job.checkpoint.keep_every)
        writer = CheckpointWriter(
            run_dir / "checkpoints", mesh, barrier, documents, keep, checkpoint_bytes(layout)
        )
        return cls(writer, asynchronous=job.checkpoint.asynchronous, copies=copies)

    def __post_init__(self) -> None:
        self.writer.on_progress = self._show

    @property
    def root(self) -> Path:
        """The folder of the checkpoints."""
        return self.writer.root

    @property
    def has_failed(self) -> bool:
        """Whether the save in flight was given up; `finish` then raises the reason."""
        return self.current is not None and self.current.failure is not None

    def activity(self, doing: str) -> str:
        """What this rank is doing: `doing`, and what its thread saves meanwhile; the save alone
        while training waits for it."""
        if not self.progress:
            return doing
        return self.progress if self.is_awaited else f"{doing}; {self.progress}"

    def save(
        self,
        step: int,
        names: Mapping[Tensor, str],
        optimizer: Optimizer,
        *,
        scale: LossScale | None = None,
    ) -> None:
        """Begin to save `step-N` after `step` steps, unless there is one; every rank calls it.
        Returns when the snapshot is taken, or where saving is not asynchronous when the checkpoint
        is published.

        names: of the parameters that this rank's shard is to have. scale: of the loss, in fp16.
        Raises SaveFailed when this save, or the one before, cannot be written on any rank.
        """
        if step in self.saved:
            return
        began = self.clock()
        with self._awaited():
            self.finish()
            self.saved.add(step)
            self._show(f"saving step {step}")
            copies = self.copies if self.asynchronous else None
            is_writer = self.writer.mesh.writes_checkpoint
            snapshot = take_snapshot(
                step, names, optimizer, scale, is_writer=is_writer, copies=copies
            )
            snapshot = replace(snapshot, fp8=self.histories())
            self.current = current = SaveInFlight(step, began)
            if not self.asynchronous:
                self._write(snapshot, current)
                self.stalled += self._end()
                return
            current.thread = Thread(
                target=self._write, args=(snapshot, current), name="saving", daemon=True
            )
            current.thread.start()
        current.stall_seconds = self.clock() - began
        self.stalled += current.stall_seconds

    def finish(self) -> None:
        """Wait for the save in flight, if there is one. Raises SaveFailed when it was given up."""
        if self.current is None:
            return
        with self._awaited():
            if self.current.thread is not None:
                self.current.thread.join()
            self._end()

    def settle(self) -> None:
        """After training has failed: let the save in flight end, as long as it makes progress, so
        that what it has copied is not lost."""
        self.writer.barrier.patience = min(self.writer.barrier.patience, SETTLE_PATIENCE)
        with suppress(Exception):
            self.finish()

    def add_times(self, record: StepRecord) -> None:
        """Add to a step's record what saving took since the record before: how long training
        waited, and how long the save lasted that ended meanwhile."""
        self._collect()
        if self.stalled:
            record["save_stall_seconds"] = self.stalled
            self.stalled = 0.0
        for times in self.times[self.recorded :]:
            record["save_seconds"] = times["seconds"]
        self.recorded = len(self.times)

    def _write(self, snapshot: Snapshot, current: SaveInFlight) -> None:
        """Write a snapshot; the thread of a save. What goes wrong is kept for `finish`, and told to
        the other ranks, which would wait for this one otherwise."""
        try:
            snapshot.arrived()
            self.writer.write(snapshot)
        except SaveFailed as error:
            current.failure = error
        except BaseException as error:
            current.failure = error
            with suppress(Exception):
                self.writer.barrier.announce(FAILED, f"{type(error).__name__}: {error}")
        current.ended = self.clock()

    def _collect(self) -> None:
        """Take over the times of a save that the thread has published."""
        current = self.current
        if current is not None and current.ended is not None and current.failure is None:
            self._end()

    def _end(self) -> float:
        """The save in flight is over: keep its times, raise its failure; returns its seconds."""
        current, self.current = self.current, None
        if current is None or current.ended is None:
            return 0.0
        if current.failure is not None:
            self.failure = current.failure
            self.saved.discard(current.step)
            raise current.failure
        seconds = current.ended - current.began
        stall = current.stall_seconds if self.asynchronous else seconds
        self.times.append({"step": current.step, "seconds": seconds, "stall_seconds": stall})
        self._show("")
        return seconds

    def _show(self, progress: str) -> None:
        self.progress = progress
        self.on_change()

    @contextmanager
    def _awaited(self) -> Iterator[None]:
        """Training waits for a save inside of the block; after an exception that is still what the
        rank was doing when it failed."""
        before, self.is_awaited = self.is_awaited, True
        yield
        self.is_awaited = before
