"""Splits a model's blocks into stages in order, filling each stage to its share of the cost.

The blocks are the layers, the output head and then the loss, which costs nothing. Stage s takes
blocks until the cost of all blocks so far exceeds (s + 1) / pp of the total; the block that exceeds
it still belongs to the stage. nanotron splits this way (build_model in its models/base.py): a layer
costs its matrices, 4 h^2 + 3 h f for an inner width f, the head v h. Early stages are therefore
fuller, the head may be on a stage without layers, and if it exceeds its share before the last
stage, the loss is on the next one, to which the logits are sent.

>>> filled_cut(16, layer=1, head=4, pp=4)        # 20 / 4 is 5, which 6 layers are the first to pass
FilledCut(counts=(6, 5, 5, 0), head_stage=3, loss_stage=3)
>>> filled_cut(16, layer=1, head=4, pp=8)
FilledCut(counts=(3, 3, 2, 3, 2, 3, 0, 0), head_stage=6, loss_stage=7)
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.spec.runtime import get_profile


class FilledCut(NamedTuple):
    """Layers of each stage, the stage of the output head, and that of the loss."""

    counts: tuple[int, ...]
    head_stage: int
    loss_stage: int


def is_filled(job: JobSpec) -> bool:
    """Whether the job's runtime fills stages this way, and no setting says otherwise."""
    p = job.parallel
    if p.pp == 1 or p.vpp > 1 or p.stage_balance != "even" or p.pipeline_layout:
        return False
    if p.first_stage_layers or p.last_stage_layers or p.embedding_is_layer or p.loss_is_layer:
        return False
    return get_profile(job.training.runtime).runs.fills_stages


@lru_cache(maxsize=4096)  # every stage of a plan asks for it
def filled_cut(layers: int, *, layer: int, head: int, pp: int) -> FilledCut:
    """The cut of `layers` layers; layer, head: the cost of one layer and of the output head."""
    whole, passed, stage, counts = layers * layer + head, 0, 0, [0] * pp
    for _ in range(layers):
        passed += layer
        counts[stage] += 1
        stage += passed * pp > whole * (stage + 1)
    head_stage = stage
    for _ in range(2):  # the head, and the cast of its logits: the loss comes after both
        stage += whole * pp > whole * (stage + 1)
    return FilledCut(tuple(counts), head_stage, stage)


def job_cut(model: ModelSpec, pp: int) -> FilledCut:
    """The cut of a model over pp stages."""
    layer = 4 * model.hidden**2 + 3 * model.hidden * model.ffn
    return filled_cut(model.all_layers, layer=layer, head=model.vocab * model.hidden, pp=pp)
