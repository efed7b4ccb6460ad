"""What each layer of a model takes, in FLOP of its matrix products: 2mnk forward, as many again for
each gradient that is computed, once more where the forward is run again.

This is what layers are dealt out by (stages.py, balance.py), and so by nothing that a device, its
efficiency or a fitted constant decides: a worker that reads the job finds the planner's cut, and an
old job keeps its cut. A lookup costs nothing, the head with the loss the product with its table.
Of one micro batch on one rank, times tp so that numbers stay whole: what all tp ranks compute
alike (BERT's pooler) counts tp times.

By hand, GPT, h 512, s 256, v 32000: a layer 6 (12 h^2 + 2 s h) = 20.4e6 a token, the head 6 v h =
98.3e6: as much as 4.8 layers. Of 8 layers on 2 stages the last one has 2 and the head.
"""

from __future__ import annotations

from math import prod

from mpctl.families import get_table
from mpctl.operators.grad_flow import GradFlow
from mpctl.operators.matmul import AttentionOp
from mpctl.operators.table import OperatorTable
from mpctl.pipeline.balance import LayerCosts
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec


def job_costs(job: JobSpec) -> LayerCosts:
    """Of a job whose model can be counted."""
    assert job.model is not None
    table = get_table(job.model, tp=job.parallel.tp, freeze=job.training.freeze)
    return layer_costs(job, job.model, table)


def layer_costs(job: JobSpec, model: ModelSpec, table: OperatorTable) -> LayerCosts:
    """Of every layer of the model, and its ends; an end between two stacks counts to its layer."""
    count = _FlopCounter(job, model)
    layers: list[int] = []
    entry = exit_ = 0
    for stack, flow in zip(table.stacks, table.flows, strict=True):
        own: list[int] = []
        for run, kind in flow.runs:
            own += [count.block(kind, stack.cores)] * len(run)
        before, exit_ = count.end(flow.entry), count.end(flow.exit)
        if layers:
            own[0] += before
        else:
            entry = before
        if stack is not table.stacks[-1]:
            own[-1] += exit_
        layers += own
    return LayerCosts(layers, entry, exit_)


class _FlopCounter:
    """Counts parts of one job's model."""

    def __init__(self, job: JobSpec, model: ModelSpec) -> None:
        self.tp, self.cp = job.parallel.tp, job.parallel.cp
        self.is_split = job.parallel.sequence_parallel
        self.is_run_again = job.training.recompute == "full"
        self.width = model.heads * model.head_size
        self.sizes = {
            "batch": job.training.micro_batch_size, "seq": model.seq_length // self.cp,
            "decoder_seq": (model.decoder_seq_length or 0) // self.cp,
        }  # fmt: skip

    def block(self, flow: GradFlow, cores: tuple[AttentionOp, ...]) -> int:
        """One layer; what lies under the first trained parameter is not run again."""
        again = int(self.is_run_again and any(need.y for need in flow.needs.values()))
        return self._products(flow, again) + sum(self._scores(flow, core, again) for core in cores)

    def end(self, flow: GradFlow) -> int:
        return self._products(flow, 0)

    def _products(self, flow: GradFlow, again: int) -> int:
        """2 x rows x elements of each matrix, forward, again, for dX and for dW."""
        weights = {weight.name: weight for weight in flow.part.weights}
        total = 0
        for product in flow.part.products:
            if product.is_lookup:
                continue
            weight, needs = weights[product.parameter], flow.needs[product.name]
            rows = prod(self.sizes[dim] for dim in product.rows)
            alike = 1 if weight.is_split or self.is_split else self.tp
            total += 2 * rows * weight.numel * alike * (1 + again + needs.x + needs.w)
        return total

    def _scores(self, flow: GradFlow, core: AttentionOp, again: int) -> int:
        """q k^T and p v, forward, again, and once more for queries and for keys; keys are of the
        whole sequence."""
        passes = 1 + again + flow.needs[core.query_product].y + flow.needs[core.key_product].y
        pairs = self.sizes["batch"] * self.sizes[core.queries] * self.sizes[core.keys] * self.cp
        return 4 * pairs * self.width * passes
