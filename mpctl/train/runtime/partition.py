"""A pipeline stage: its chunks as modules, the tensors at their boundaries, and the parameters that
it shares with other stages.

All of it follows from the operator table and the cut in stages.py, as does the plan. A parameter
that several stages hold (a word table and the head tied to it, a table that all layers of a stack
add) starts equal everywhere, since its value depends on its name. The first of these stages owns
it: there it counts in the norm and is saved. Chunks of one stage share the same tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from mpctl.core.sharding import View, local_size
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.table import StageSlice
from mpctl.model.pipeline.schedule.program import Program, program
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.train.families.implementation import FamilyModule


@dataclass(frozen=True)
class StageBoundary:
    """The tensors that one chunk passes to the next: this rank's shape of each, without the
    dimension of samples, and whether its gradient comes back. The pipeline's ends have none."""

    shapes: tuple[tuple[int, ...], ...] = ()
    needs: tuple[bool, ...] = ()


@dataclass(frozen=True)
class PipelinePartition:
    """A job's layout as pipeline stage `stage` sees it."""

    layout: JobLayout
    stage: int

    @classmethod
    def of(cls, job: JobSpec, stage: int) -> PipelinePartition:
        """The partition of a stage of a complete job with a model."""
        return cls(JobLayout.of(job), stage)

    @property
    def job(self) -> JobSpec:
        """The job that is run."""
        return self.layout.job

    @property
    def model(self) -> ModelSpec:
        """The job's model."""
        return self.layout.model

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.layout.stages)

    @property
    def chunks(self) -> list[tuple[StageSlice, ...]]:
        """Slices of the layer stacks in each chunk of this stage."""
        count = len(self.layout.stages[self.stage])
        return [self.layout.chunk_slices(self.stage, chunk) for chunk in range(count)]

    @cached_property
    def borders(self) -> list[tuple[StageBoundary, StageBoundary]]:
        """The boundaries before and after each chunk."""
        chunks = range(len(self.layout.stages[self.stage]))
        borders = [(self._border(chunk, after=False), self._border(chunk, after=True)) for chunk in chunks]
        last = self.layout.placement.last
        if self.stage == 0:
            borders[0] = StageBoundary(), borders[0][1]
        if self.stage == last.stage:
            borders[last.chunk] = borders[last.chunk][0], StageBoundary()
        return borders

    @property
    def schedule(self) -> str:
        """The schedule that is run. A single stage would gain nothing by keeping the activations of
        more than one micro batch."""
        return self.job.parallel.schedule if self.stages > 1 else "1f1b"

    @cached_property
    def program(self) -> Program:
        """The steps of this stage in a training step, in their order."""
        return program(
            self.schedule,
            stage=self.stage,
            stages=self.stages,
            microbatches=self.job.num_microbatches,
            chunks=self.job.parallel.vpp,
        )

    def own_samples(self, count: int) -> int:
        """Number of samples that this rank's part of a boundary tensor has, of `count` in the micro
        batch: all, or fewer if a grid of tensor-parallel ranks splits them."""
        return local_size(count, parts=self.layout.grid.sample_parts)

    def owns(self, name: str) -> bool:
        """Whether no earlier stage holds this parameter as well."""
        return self.layout.shared_parameters.get(name, (self.stage,))[0] == self.stage

    def view_of(self, name: str) -> View:
        """Return the placement of a parameter of the stage on the ranks."""
        return self._views[name]

    @cached_property
    def _views(self) -> dict[str, View]:
        layout = self.layout
        return {w.name: layout.views[w.view] for w in layout.stage_parameters(self.stage)}

    def _border(self, chunk: int, *, after: bool) -> StageBoundary:
        p, model = self.job.parallel, self.model
        parts = p.cp * (p.tp if p.sequence_parallel else 1)
        whole = {"seq": model.seq_length, "decoder_seq": model.decoder_seq_length or 0}
        local = {dim: local_size(size, parts=parts) for dim, size in whole.items()}
        hidden = local_size(model.hidden, parts=self.layout.grid.hidden_parts)
        sizes = {**local, "hidden": hidden}
        # [b, s, h] -> [s/c, h], or [s/(ct), h] under sequence parallelism; h/q or h/l on a grid
        border = self.layout.border(self.stage, chunk, after=after)
        shapes = (tuple(sizes[dim] for dim in dims[1:]) for dims in border.dims)
        return StageBoundary(tuple(shapes), border.needs)


def stage_model(chunks: Sequence[FamilyModule]) -> nn.Module:
    """All chunks of a stage as one module."""
    return chunks[0] if len(chunks) == 1 else Chunks(chunks)


class Chunks(nn.Module):
    """Several chunks of one model. Parameters keep their global names."""

    def __init__(self, chunks: Sequence[FamilyModule]) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        first: dict[str, nn.Parameter] = {}
        for chunk in chunks:
            for name, parameter in list(chunk.named_parameters()):
                owner, _, leaf = name.rpartition(".")
                setattr(chunk.get_submodule(owner), leaf, first.setdefault(name, parameter))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once: chunks with a parameter of one name share it."""
        seen: set[Tensor] = set()
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters(prefix, recurse, remove_duplicate):
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter
