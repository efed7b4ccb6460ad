"""The cost of each layer of a model, in FLOP of its matrix products.

A product counts 2mnk in forward, as much again for each gradient that is computed, and once more if
forward is recomputed. Layers are balanced by these numbers (stages.py, balance.py), which depend on
no device, efficiency or fitted constant: a worker that reads the job finds the planner's cut, and
a job of an older version keeps its cut. An embedding lookup costs nothing; the head costs the
product with its table.

Numbers are for one micro batch on one rank, times tp to keep them integers. Work that all tp ranks
repeat (BERT's pooler) therefore counts tp times.

By hand, GPT, h 512, s 256, v 32000: a layer 6 (12 h^2 + 2 s h) = 20.4e6 a token, the head 6 v h =
98.3e6: as much as 4.8 layers. Of 8 layers on 2 stages the last one has 2 and the head.
"""

from __future__ import annotations

from mpctl.model.families import get_table
from mpctl.model.operators.flops import FlopCounter, sequence_sizes
from mpctl.model.operators.grad_flow import GradFlow
from mpctl.model.operators.table import OperatorTable
from mpctl.model.pipeline.balance import LayerCosts
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec


def job_costs(job: JobSpec) -> LayerCosts:
    """The costs of a job's layers; the job must have a model that the other rules accept."""
    assert job.model is not None
    table = get_table(
        job.model,
        tp=job.parallel.tp,
        freeze=job.training.freeze,
        adapter=job.training.adapter,
        packed=job.packed_attention,
    )
    return layer_costs(job, job.model, table)


def layer_costs(job: JobSpec, model: ModelSpec, table: OperatorTable) -> LayerCosts:
    """FLOP x tp of one micro batch, for every layer and for the model's ends.

    An end between two stacks (encoder, decoder) is added to the layer next to it.
    """
    p, again = job.parallel, int(job.training.recompute == "full")
    sizes = sequence_sizes(model, batch=job.training.micro_batch_size, cp=p.cp)
    counter = FlopCounter.of(model, p, sizes)
    layers: list[int] = []
    entry = exit_ = 0
    for stack, flow in zip(table.stacks, table.flows, strict=True):
        own: list[int] = []
        for run, kind in flow.runs:
            own += [_block(counter, kind, again)] * len(run)
        before, exit_ = _end(counter, flow.entry), _end(counter, flow.exit)
        if layers:
            own[0] += before
        else:
            entry = before
        if stack is not table.stacks[-1]:
            own[-1] += exit_
        layers += own
    return LayerCosts(layers, entry, exit_)


def _block(counter: FlopCounter, flow: GradFlow, again: int) -> int:
    """FLOP x tp of one layer; a layer without a backward is not recomputed."""
    again *= any(needs.y for needs in flow.needs.values())
    products = counter.products(flow, lambda needs: 1 + again + needs.x + needs.w)
    return products + _scores(counter, flow, again)


def _end(counter: FlopCounter, flow: GradFlow) -> int:
    products = counter.products(flow, lambda needs: 1 + needs.x + needs.w)
    return products + _scores(counter, flow, 0)


def _scores(counter: FlopCounter, flow: GradFlow, again: int) -> int:
    return sum(
        counter.scores(core, 1 + again + flow.needs[core.query_product].y + flow.needs[core.key_product].y)
        for core in flow.cores
    )
