"""Every rule that a layout must keep, all answered at once: rule, value, bound, way out.

A rule is a small generator of Checks over a job; it never raises and never stops the next one. What
Megatron and its kin enforce one assertion at a time (world, layers, heads, kv heads, ffn, sequence,
batches) stands in rules/ beside what they do not check: tensor-parallel groups that leave their
node, the cluster against the layout, memory against the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpctl.rules import family, freeze, layout, model
from mpctl.rules.check import Check
from mpctl.spec.job import JobSpec

Rule = Callable[[JobSpec], Iterator[Check]]
LAYOUT, SHAPE, BATCH = {"cluster", "parallel"}, {"parallel", "model"}, {"parallel", "training"}
RULES: tuple[tuple[Rule, set[str]], ...] = (  # each with the tables that it reads
    (layout.world_rules, LAYOUT),
    (layout.order_rules, LAYOUT),
    (layout.node_rules, LAYOUT),
    (layout.pipeline_rules, SHAPE | BATCH),
    (layout.tensor_mode_rules, LAYOUT),
    (layout.zero_rules, LAYOUT),
    (model.model_rules, SHAPE),
    (family.family_rules, SHAPE),
    (family.decoder_rules, SHAPE),
    (model.head_rules, SHAPE),
    (model.width_rules, SHAPE),
    (model.sequence_rules, SHAPE),
    (model.batch_rules, LAYOUT | BATCH),
    (model.recompute_rules, BATCH),
    (freeze.freeze_rules, {"model", "training"}),
    (model.dtype_rules, {"cluster", "training"}),
    (model.slow_dtype, {"cluster", "training"}),
)


def check_job(job: JobSpec, doubtful: frozenset[str] = frozenset()) -> list[Check]:
    """Every rule's answer, in the order in which people read a layout.

    Rules that read a doubtful table are not asked: their answer would be about a default.
    """
    asked = [rule for rule, tables in RULES if not tables & doubtful]
    return [check for rule in asked for check in rule(job)]
