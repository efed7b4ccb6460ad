"""Run a function on n ranks of a late world (world.py).

    def double(rank: int, size: int, world: LateWorld, x: Tensor) -> Tensor: ...  # at module level
    results = run_late_ranks(double, 4, torch.ones(3))

as tests/ranks.py does in the ordinary one. What the function returns is read after every message
has come to an end and nobody has been forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mpctl.model.layout.job_layout import JobLayout
from mpctl.spec.job import JobSpec
from mpctl.spec.load import parse
from mpctl.train.checkpoint.saver import Saver
from mpctl.train.checkpoint.snapshot import Snapshot
from mpctl.train.checkpoint.writer import CheckpointWriter
from mpctl.train.runtime.build import build_trainer
from mpctl.train.runtime.environment import RuntimeEnvironment
from mpctl.train.runtime.train import Trainer
from tests.late.world import LateWorld, host_thread, join_late
from tests.ranks import run_ranks
from tests.train.runtime.tiny import trained_rank


def run_late_ranks(
    function: Callable[..., Any], n: int, *args: Any, timeout: float = 100, is_serial: bool = False
) -> list[Any]:
    """`function(rank, size, world, *args)` on n ranks of a late world; results by rank. is_serial:
    as of LateWorld. Raises AssertionError with the traceback of the first rank that failed, or at
    the timeout."""
    join = partial(join_late, is_serial=is_serial)
    return run_ranks(_late_rank, n, function, args, timeout=timeout, join=join)


def _late_rank(rank: int, size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with dist.group.WORLD.world.entered() as world:
        return function(rank, size, world, *args)


def late_trainer(job: JobSpec, run_dir: Path, rank: int, world: LateWorld) -> Trainer:
    """A trainer whose messages, and whose side streams, are the world's; the update is given in
    advance, as on a device, which without clipping makes the same bits as on a CPU."""
    environment = RuntimeEnvironment.of_machine(job, run_dir, local_rank=rank)
    environment = replace(environment, make_stream=world.make_stream, runs_ahead=True)
    trainer = build_trainer(run_dir, JobLayout.of(job), rank, environment)
    trainer.saver = LateSaver.of(trainer.saver, world)
    return trainer


@dataclass(frozen=True)
class LateWriter:
    """Writes a rank's part of a checkpoint, in a thread of the host, whose reads of the copies are
    checked."""

    writer: CheckpointWriter
    world: LateWorld

    def __getattr__(self, name: str) -> Any:
        return getattr(self.writer, name)

    def write(self, snapshot: Snapshot, on_progress: Callable[[str], None]) -> None:
        """See CheckpointWriter.write. Raises Race."""
        for entry in snapshot.entries:
            words = f"the file of step {snapshot.step}"
            self.world.host_uses(entry.make(), words, writes=False, thread=host_thread())
        self.writer.write(snapshot, on_progress)


@dataclass
class LateSaver(Saver):
    """A saver whose thread is a stream of a late world."""

    world: LateWorld | None = None

    @classmethod
    def of(cls, saver: Saver, world: LateWorld) -> LateSaver:
        """The same saver, watched."""
        late = cls(saver.writer, saver.copies, saver.on_change, world=world)
        late.writer = LateWriter(saver.writer, world)  # type: ignore[assignment]
        return late

    def finish(self) -> None:
        """See Saver.finish: the host waits for the thread."""
        super().finish()
        assert self.world is not None
        self.world.host_waits(self.world.order.clock("thread saving"))


def train_late(job: JobSpec, run_dir: Path, *, is_serial: bool = False) -> list[dict[str, Any]]:
    """Train in a late world, without shared memory; what tests.train.runtime.tiny.train returns."""
    launch = job.launch.model_copy(update={"shared_memory": False})
    raw = job.model_copy(update={"launch": launch}).model_dump(mode="json")
    n = job.world_size
    return run_late_ranks(_train_late_rank, n, raw, str(run_dir), is_serial=is_serial)


def _train_late_rank(rank: int, size: int, world: LateWorld, raw: dict[str, Any], run_dir: str) -> dict[str, Any]:
    trainer = late_trainer(parse(raw), Path(run_dir), rank, world)
    result = trained_rank(trainer)
    if trainer.saver.copies is not None:
        trainer.saver.copies.join()  # as the host, which has written what was copied
    return result
