"""Every rule that a layout must keep, all answered at once: rule, value, bound, way out.

A rule is a small generator of Checks over a job; it never raises and never stops the next one. What
Megatron and its kin enforce one assertion at a time (world, layers, heads, kv heads, ffn, sequence,
batches) stands in rules/ beside what they do not check: tensor-parallel groups that leave their
node, the cluster against the layout, memory against the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpctl.rules import layout, model
from mpctl.rules.check import Check
from mpctl.spec.job import JobSpec

Rule = Callable[[JobSpec], Iterator[Check]]
RULES: tuple[Rule, ...] = (
    layout.world_rules,
    layout.order_rules,
    layout.node_rules,
    layout.pipeline_rules,
    layout.tensor_mode_rules,
    layout.zero_rules,
    model.model_rules,
    model.head_rules,
    model.width_rules,
    model.sequence_rules,
    model.batch_rules,
    model.dtype_rules,
)


def check_job(job: JobSpec) -> list[Check]:
    """Every rule's answer, in the order in which people read a layout."""
    return [check for rule in RULES for check in rule(job)]
