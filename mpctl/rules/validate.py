"""Every rule that a layout must keep, all answered at once: rule, value, bound, way out.

A rule is a small generator of Checks over a job; it never raises and never stops the next one. What
Megatron and its kin enforce one assertion at a time (world, layers, heads, kv heads, ffn, sequence,
batches) stands in rules/ beside what they do not check: tensor-parallel groups that leave their
node, the cluster against the layout, memory against the device.

A hint names only values that every rule accepts: each is tried on the job before it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from mpctl.errors import Offer
from mpctl.rules import family, freeze, layout, model, rates
from mpctl.rules.check import MOST_OFFERED, Check, way_out
from mpctl.spec.job import JobSpec, changed_job

Rule = Callable[[JobSpec], Iterator[Check]]
MOST_TRIED = 64  # values of an offer
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
    (family.relative_rules, {"model"}),
    (model.head_rules, SHAPE),
    (model.rotary_rules, {"model"}),
    (model.width_rules, SHAPE),
    (model.sequence_rules, SHAPE),
    (model.batch_rules, LAYOUT | BATCH),
    (model.recompute_rules, BATCH),
    (rates.rate_rules, {"training"}),
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


NO_VALUE = "no value of it alone is legal in this job: change other settings with it"


def with_tried_hints(
    job: JobSpec, checks: list[Check], blanks: frozenset[str] = frozenset()
) -> list[Check]:
    """The checks of a job, with hints that name only values which all rules accept.

    blanks: settings that were left open, which follow from the others anew (spec/job.py).
    """
    failing = {check.rule for check in checks if check.status == "error"}
    return [_tried(job, check, failing, blanks) if check.offers else check for check in checks]


def _tried(job: JobSpec, check: Check, failing: set[str], blanks: frozenset[str]) -> Check:
    def accepts(offer: Offer, value: int | str) -> bool:
        tried = changed_job(job, {offer.setting: value, **dict(offer.also)}, blanks)
        if tried is None:
            return False
        errors = [found for found in check_job(tried) if found.status == "error"]
        own = {check.rule} | {found.rule for found in errors if found.where == offer.setting}
        return not any(found.rule in own or found.rule not in failing for found in errors)

    offers = tuple(_accepted(offer, accepts) for offer in check.offers)
    hint = way_out(offers, check.more)
    return replace(check, offers=offers, hint=hint or NO_VALUE)


def _accepted(offer: Offer, accepts: Callable[[Offer, int | str], bool]) -> Offer:
    """The offer less what is not accepted; of one with a nearest, no more than will be told."""
    most = MOST_OFFERED if offer.near is not None else MOST_TRIED
    found = islice((v for v in offer.by_nearness[:MOST_TRIED] if accepts(offer, v)), most)
    legal = set(found)
    return replace(offer, values=tuple(value for value in offer.values if value in legal))
