"""Current activity of a rank. The trainer and its pipeline write it; breadcrumbs, profiles, memory
trackers and rehearsals read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpctl.model.pipeline.schedule.program import Step
from mpctl.spec.job import JobSpec


def nobody_follows() -> None:
    """An `on_change` that does nothing."""


@dataclass
class Activity:
    """on_change: called when the rank starts to do something else; on_move: when it starts another
    step of the pipeline program, by a memory tracker. phase: what it is doing, as
    text, such as `step 3`. current: the step of the pipeline program that is running, None between
    steps. stage: the rank's stage, None in a pipeline of one stage; has_chunks: whether it has
    several chunks."""

    on_change: Callable[[], None] = nobody_follows
    stage: int | None = None
    has_chunks: bool = False
    phase: str = "starting"
    current: Step | None = None
    on_move: Callable[[], None] = nobody_follows

    @classmethod
    def of(cls, job: JobSpec, stage: int, on_change: Callable[[], None]) -> Activity:
        """The activity of a rank in this stage of a job."""
        parallel = job.parallel
        return cls(on_change, stage if parallel.pp > 1 else None, parallel.vpp > 1)

    def move(self, step: Step | None) -> None:
        """Note which step of the pipeline program is running."""
        self.current = step
        self.on_change()
        self.on_move()

    @property
    def text(self) -> str:
        """`step 3, stage 1, forward of micro batch 2`."""
        current = self.current  # the thread of a save reads it while training moves on
        if current is None or self.stage is None:
            return self.phase
        kind, microbatch, chunk = current.action
        of_chunk = f" in chunk {chunk}" if self.has_chunks else ""
        word = kind.replace("_", " ")
        return f"{self.phase}, stage {self.stage}, {word} of micro batch {microbatch}{of_chunk}"
