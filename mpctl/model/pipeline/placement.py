"""Where the virtual stages of a pipeline are: which chunk of which stage.

Virtual stages are the parts of the model in order. They go over the p stages once for each chunk:
always forward (interleaving, arXiv 2104.04473 section 2.2), or forward and back under a schedule of
the shape of a V, so that the last stage hands over to itself and stage 0 has both ends of the model.
Everything that asks where a layer, the embedding or the head is asks here.

>>> looped, v = StagePlacement(stages=3, chunks=2), StagePlacement(stages=3, chunks=2, is_v=True)
>>> [looped.place(virtual).stage for virtual in range(6)], [v.place(virtual).stage for virtual in range(6)]
([0, 1, 2, 0, 1, 2], [0, 1, 2, 2, 1, 0])
"""

from __future__ import annotations

from typing import NamedTuple

from mpctl.spec.parallel import ParallelSpec
from mpctl.spec.schedules import SCHEDULES


class StageChunk(NamedTuple):
    """A chunk of a stage: one virtual stage."""

    stage: int
    chunk: int


class StagePlacement(NamedTuple):
    """Numbers of stages and of chunks on each, and whether every second chunk runs backward."""

    stages: int
    chunks: int = 1
    is_v: bool = False

    @classmethod
    def of(cls, parallel: ParallelSpec) -> StagePlacement:
        """The placement that a job's schedule gives."""
        return cls(parallel.pp, parallel.vpp, parallel.pp > 1 and SCHEDULES[parallel.schedule].is_v)

    def place(self, virtual: int) -> StageChunk:
        """Where a virtual stage is."""
        chunk, stage = divmod(virtual, self.stages)
        return StageChunk(self._turned(stage, chunk), chunk)

    def virtual(self, place: StageChunk) -> int:
        """Number of the virtual stage at a place."""
        return place.chunk * self.stages + self._turned(place.stage, place.chunk)

    def _turned(self, stage: int, chunk: int) -> int:
        return self.stages - 1 - stage if self.is_v and chunk % 2 else stage

    @property
    def last(self) -> StageChunk:
        """The end of the model, with the output head."""
        return self.place(self.stages * self.chunks - 1)

    def neighbour(self, place: StageChunk, step: int) -> StageChunk | None:
        """The place `step` virtual stages on; None beyond an end of the model."""
        virtual = self.virtual(place) + step
        return self.place(virtual) if 0 <= virtual < self.stages * self.chunks else None
