"""What a pipeline stage holds: its chunks as modules, the tensors at their borders, and which of
its parameters other stages hold too.

All of it is read off the operator table and the cut of stages.py, as the plan is. A parameter that
several stages hold (a word table and the head tied to it, a table that all layers of a stack add)
starts equal everywhere, for its value follows from its name; the first of these stages owns it: it
counts in the norm and is saved there. Two chunks of one stage hold one and the same tensor.

By hand, 4 layers, pp 2, vpp 2, a tied head: stage 0 holds layers 0 and 2 and the word table, which
stage 1, of layers 1 and 3, has too: holders are (0, 1), owner 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, nn

from mpctl.families import get_table
from mpctl.families.batch import FamilyModule
from mpctl.operators.table import OperatorTable, StageSlice
from mpctl.pipeline.stages import Span, job_stages
from mpctl.sharding import local_size
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec


@dataclass(frozen=True)
class StageBoundary:
    """The tensors that one chunk hands to the next: this rank's shape of each, the batch left out,
    and whether its gradient comes back. Outside the pipeline there are none."""

    shapes: tuple[tuple[int, ...], ...] = ()
    needs: tuple[bool, ...] = ()


@dataclass(frozen=True)
class PipelinePartition:
    """A model cut into stages, as stage `stage` sees it. spans: layers by [stage][chunk]."""

    job: JobSpec
    model: ModelSpec
    table: OperatorTable
    spans: list[list[Span]]
    stage: int

    @classmethod
    def of(cls, job: JobSpec, stage: int) -> PipelinePartition:
        model = job.model
        assert model is not None
        table = get_table(model, tp=job.parallel.tp)
        table = replace(table, freeze=tuple(job.training.freeze))
        return cls(job, model, table, job_stages(job, table.layers), stage)

    @property
    def stages(self) -> int:
        return len(self.spans)

    @property
    def is_last(self) -> bool:
        """Whether the loss is known here."""
        return self.stage == self.stages - 1

    @property
    def chunks(self) -> list[list[StageSlice]]:
        """What each chunk holds of each stack."""
        ends = {"is_first": self.stage == 0, "is_last": self.is_last}
        return [self.table.held([span], **ends) for span in self.spans[self.stage]]

    @cached_property
    def borders(self) -> list[tuple[StageBoundary, StageBoundary]]:
        """Before and behind each chunk."""
        spans = self.spans[self.stage]
        found = [(self._border(start), self._border(stop)) for start, stop in spans]
        if self.stage == 0:
            found[0] = StageBoundary(), found[0][1]
        if self.is_last:
            found[-1] = found[-1][0], StageBoundary()
        return found

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """The stages of each parameter that several have."""
        found: dict[str, tuple[int, ...]] = {}
        for stage, spans in enumerate(self.spans):
            is_last = stage == self.stages - 1
            held = self.table.stage_weights(spans, is_first=stage == 0, is_last=is_last)
            for weight in held:
                found[weight.name] = (*found.get(weight.name, ()), stage)
        return {name: stages for name, stages in found.items() if len(stages) > 1}

    def owns(self, name: str) -> bool:
        """Of a parameter of this stage, whether no stage before has it."""
        return self.holders.get(name, (self.stage,))[0] == self.stage

    @property
    def names(self) -> set[str]:
        """Every parameter of the model."""
        return {weight.name for weight in self.table.weights()}

    def _border(self, layer: int) -> StageBoundary:
        p, model = self.job.parallel, self.model
        parts = p.cp * (p.tp if p.sequence_parallel else 1)
        whole = {"seq": model.seq_length, "decoder_seq": model.decoder_seq_length or 0}
        local = {dim: local_size(size, parts=parts) for dim, size in whole.items()}
        sizes = {**local, "hidden": model.hidden}
        # [b, s, h] -> [s/c, h], or [s/(ct), h] under sequence parallelism
        shapes = (tuple(sizes[dim] for dim in dims[1:]) for dims in self.table.boundary(layer))
        return StageBoundary(tuple(shapes), self.table.boundary_needs(layer))


class Chunks(nn.Module):
    """Several chunks of one model, whose parameters keep their global names."""

    def __init__(self, chunks: Sequence[FamilyModule]) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        first: dict[str, nn.Parameter] = {}
        for chunk in chunks:
            for name, parameter in list(chunk.named_parameters()):
                place, _, leaf = name.rpartition(".")
                setattr(chunk.get_submodule(place), leaf, first.setdefault(name, parameter))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Each once: chunks that have a parameter of one name share it."""
        seen: set[Tensor] = set()
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters(prefix, recurse, remove_duplicate):
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter
