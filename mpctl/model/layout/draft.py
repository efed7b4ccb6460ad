"""The parts of a job's layout, before it is known whether the job is legal.

Rules read it, and the layout of a legal job is made of the same parts: each is computed once, when
it is first used.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from mpctl.core.topology import Topology
from mpctl.model.layout.topology import find_topology
from mpctl.model.pipeline.explicit import separates_prediction
from mpctl.model.pipeline.stages import Span, job_stages
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.spec.runtime import RuntimeProfile, job_profile

if TYPE_CHECKING:  # a job without a model never pays for these
    from mpctl.model.layout.job_layout import JobLayout
    from mpctl.model.operators.table import OperatorTable
    from mpctl.model.pipeline.balance import LayerCosts


class LayoutDraft:
    """The parts of a layout. job: complete; for an illegal one each part may raise the errors of
    its function. table, stages: passed if known already, as a search shares them."""

    def __init__(
        self, job: JobSpec, *, table: OperatorTable | None = None, stages: list[list[Span]] | None = None
    ) -> None:
        self.job = job
        self._table, self._stages = table, stages

    @property
    def model(self) -> ModelSpec:
        """The job's model, which it must have."""
        assert self.job.model is not None, "the parts of a layout are those of a model"
        return self.job.model

    @cached_property
    def profile(self) -> RuntimeProfile:
        """The profile of the software that runs the job. Raises InputError where its file is wrong."""
        return job_profile(self.job.training)

    @cached_property
    def topology(self) -> Topology | None:
        """The place of every rank; None where the axes do not fill the world, their order is
        invalid, or the tensor-parallel ranks form no grid."""
        return find_topology(self.job)

    @cached_property
    def table(self) -> OperatorTable:
        """The model's operators, with the patterns of `training.freeze` applied."""
        from mpctl.model.families import get_table

        job = self.job
        return self._table or get_table(
            self.model,
            tp=job.parallel.tp,
            freeze=job.training.freeze,
            adapter=job.training.adapter,
            packed=job.packed_attention,
            apart=separates_prediction(job),
        )

    @cached_property
    def stages(self) -> list[list[Span]]:
        """Half-open spans of layers by [stage][chunk]. Raises UnevenLayersError."""
        return self._stages or job_stages(self.job, self.model.all_layers)

    @cached_property
    def costs(self) -> LayerCosts:
        """FLOP x tp of one micro batch, for every layer and for the model's ends."""
        from mpctl.model.pipeline.costs import layer_costs

        return layer_costs(self.job, self.model, self.table)

    def layout(self) -> JobLayout:
        """The layout of a legal job with a model."""
        from mpctl.model.layout.job_layout import JobLayout

        known = {} if self.topology is None else {"topology": self.topology}
        return JobLayout.assemble(self.job, self.model, self.table, self.stages, profile=self.profile, **known)
