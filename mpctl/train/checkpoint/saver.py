"""Saving while training goes on: a copy of this rank's state, then a thread that writes it.

A save has two parts. The snapshot is taken between two steps: slices of ZeRO are gathered bucket by
bucket, and the ranks that write copy values and moments to host memory; from a GPU they only start
to, and the copies continue during the next step (snapshot.py). Training waits only for that.
Writing (writer.py: hash, write, synchronise, publish) then continues in a thread, with no
collective, for as long as it takes. With `checkpoint.asynchronous = false` both parts happen
between two steps and nothing is copied.

One save is in flight at a time: the next one waits for it, and so does the end of a run. The
failure of a save is raised by the next `save` or `finish`; the trainer asks `has_failed` once a
step and lets all ranks stop after the same one.

Memory: the copies are kept for the next save, so a rank that writes needs the bytes of its shard in
host memory once more (plan/estimate/states.py); `reserve` takes it before the first step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

from torch import Tensor

from mpctl.records.checkpoint.folder import SaveTimes
from mpctl.records.checkpoint.manifest import ManifestTables
from mpctl.train.checkpoint.snapshot import HostCopies, OptimizerState, Snapshot, take_snapshot
from mpctl.train.checkpoint.writer import FAILED, CheckpointWriter, SaveFailed

DRAIN_PATIENCE = 10.0
"""Seconds without progress after which a rank that has failed no longer waits for its save."""
DRAIN_POLL = 0.5


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

    copies: what a save is written from by a thread; None where training waits until it is
    published. on_change: called when `activity` changes. progress: text about the current save,
    `saving step 3: 20 MiB of 1 GiB written`, empty while nothing is. is_awaited: whether this
    rank's training waits for a save now. saved: steps of which there is a checkpoint, the one being
    written included. times: of the saves that ended; failure: why one was given up.
    """

    writer: CheckpointWriter
    copies: HostCopies | None = field(default_factory=HostCopies)
    on_change: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.perf_counter
    progress: str = ""
    is_awaited: bool = False
    saved: set[int] = field(default_factory=set)
    times: list[SaveTimes] = field(default_factory=list)
    failure: BaseException | None = None
    current: SaveInFlight | None = None
    stalled: float = 0.0
    recorded: int = 0

    @property
    def root(self) -> Path:
        return self.writer.root

    @property
    def has_failed(self) -> bool:
        """Whether the save in flight was given up; `finish` then raises the reason."""
        return self.current is not None and self.current.failure is not None

    @property
    def is_saving(self) -> bool:
        """Whether this rank is writing a checkpoint, perhaps in the background."""
        return bool(self.progress)

    def activity(self, doing: str) -> str:
        """Describe this rank's activity: `doing` and the save in progress; only the save while
        training waits for it."""
        if not self.progress:
            return doing
        return self.progress if self.is_awaited else f"{doing}; {self.progress}"

    def reserve(self, names: Mapping[Tensor, str], optimizer: OptimizerState) -> None:
        """Take the host memory of the copies, so that no save has to. names: as of `save`. Raises
        RunFailed if it cannot be pinned."""
        if self.copies is not None and self.writer.is_writer:
            self.copies.reserve(names, optimizer)

    def save(
        self, step: int, names: Mapping[Tensor, str], optimizer: OptimizerState, *, tables: ManifestTables
    ) -> None:
        """Begin to save `step-N` after `step` steps, unless there is one; every rank calls it.
        Returns when the snapshot is taken, or where saving is not asynchronous when the checkpoint
        is published.

        names: of the parameters and buffers that this rank's shard is to have. tables: what the
        manifest is to hold, the same on every rank.
        Raises SaveFailed when this save, or the one before, cannot be written on any rank.
        """
        if step in self.saved:
            return
        began = self.clock()
        with self._awaited():
            self.finish()
            self.saved.add(step)
            self._show(f"saving step {step}")
            snapshot = take_snapshot(
                step, names, optimizer, is_writer=self.writer.is_writer, copies=self.copies, tables=tables
            )
            self.current = current = SaveInFlight(step, began)
            if self.copies is None:
                self._write(snapshot, current)
                self.stalled += self._end()
                return
            current.thread = Thread(target=self._write, args=(snapshot, current), name="saving", daemon=True)
            current.thread.start()
        current.stall_seconds = self.clock() - began
        self.stalled += current.stall_seconds

    def finish(self) -> None:
        """Wait for the save in flight, if any. Raises SaveFailed when it was given up."""
        if self.current is None:
            return
        with self._awaited():
            if self.current.thread is not None:
                self.current.thread.join()
            self._end()

    def drain(self) -> None:
        """After training has failed: let the save in flight end, as long as it makes progress, so
        that what it has copied is not lost. A save that stands still is left to its thread."""
        barrier, current = self.writer.barrier, self.current
        barrier.patience, barrier.moved = min(barrier.patience, DRAIN_PATIENCE), barrier.clock()
        with suppress(Exception), self._awaited():
            if current is not None and (thread := current.thread) is not None:
                while thread.is_alive() and not barrier.is_silent:
                    thread.join(DRAIN_POLL)
                thread.join(DRAIN_POLL)  # one that waits for other ranks gives up now, too
                if thread.is_alive():
                    return
            self.finish()

    def take_times(self) -> tuple[float, float | None]:
        """The times of saving since the last call: the seconds that training waited, and the
        duration of the save that has ended meanwhile, None without one."""
        self._collect()
        stalled, self.stalled = self.stalled, 0.0
        ended, self.recorded = self.times[self.recorded :], len(self.times)
        return stalled, ended[-1]["seconds"] if ended else None

    def _write(self, snapshot: Snapshot, current: SaveInFlight) -> None:
        """Write a snapshot, in the thread of a save. An error is stored for `finish` and announced
        to the other ranks, which would otherwise wait for this one."""
        try:
            self.writer.barrier.begin()  # first: a failure is announced as one of this save
            snapshot.arrived.synchronize()
            self.writer.write(snapshot, self._show)
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
        stall = seconds if current.thread is None else current.stall_seconds
        self.times.append({"step": current.step, "seconds": seconds, "stall_seconds": stall})
        self._show("")
        return seconds

    def _show(self, progress: str) -> None:
        self.progress = progress
        self.on_change()

    @contextmanager
    def _awaited(self) -> Iterator[None]:
        """Mark that training waits for a save in the block; the mark stays after an exception, as
        what the rank was doing when it failed."""
        before = self.is_awaited
        self._mark_awaited(True)
        yield
        self._mark_awaited(before)

    def _mark_awaited(self, is_awaited: bool) -> None:
        has_changed, self.is_awaited = is_awaited != self.is_awaited, is_awaited
        if has_changed and self.progress:
            self.on_change()
