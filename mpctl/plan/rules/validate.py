"""All rules that a layout must keep, checked at once: rule, value, bound, way out.

A rule is a generator of Checks over the draft of a layout; it never raises and never stops the next one. To add
one, write the generator in the file of its subject and add a row to RULES, with the tables of a job
that it reads: then every plan, launch, search and batch checks it, and the values that it offers
are tried before a hint names them. The assertions of Megatron and similar software (world, layers,
heads, kv heads, ffn, sequence, batches) are all in rules/, with what those do not check:
tensor-parallel groups that leave their NVLink domain, the cluster against the layout, memory
against the device.

A hint names only values that every rule accepts: each is tried on the job first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from mpctl.core.errors import Issue, Offer, Status
from mpctl.model.layout.draft import LayoutDraft
from mpctl.plan.rules import (
    adapters,
    chat,
    context,
    experts,
    gradients,
    launched,
    layout,
    loss,
    model,
    optimizers,
    runtime,
    tensor_mode,
    training,
)
from mpctl.plan.rules.check import MOST_OFFERED, Check, way_out
from mpctl.spec.job import JobSpec, changed_job
from mpctl.spec.model import ModelSpec

MOST_TRIED = 64  # values of an offer
LAYOUT, SHAPE, BATCH = {"cluster", "parallel"}, {"parallel", "model"}, {"parallel", "training"}


class Rule(NamedTuple):
    """A rule: its generator of checks, the tables of the job that it reads, and the worst answer that
    it gives. One that only warns is not asked where only errors count, as in a search."""

    answer: Callable[[LayoutDraft], Iterator[Check]]
    reads: set[str]
    severity: Status = "error"


WARNING: Status = "warning"
RULES: tuple[Rule, ...] = (
    Rule(layout.world_rules, LAYOUT),
    Rule(layout.order_rules, LAYOUT),
    Rule(layout.domain_rules, LAYOUT),
    Rule(layout.link_rules, LAYOUT),
    Rule(experts.view_rules, LAYOUT | {"model"}),
    Rule(experts.expert_domain_rules, LAYOUT | SHAPE | BATCH, WARNING),
    Rule(layout.pipeline_rules, SHAPE | BATCH),
    Rule(layout.balance_rules, SHAPE | BATCH, WARNING),
    Rule(runtime.runtime_rules, LAYOUT | BATCH, WARNING),
    Rule(runtime.start_rules, LAYOUT | SHAPE | BATCH),
    Rule(tensor_mode.tensor_mode_rules, LAYOUT),
    Rule(tensor_mode.combination_rules, BATCH),
    Rule(tensor_mode.family_mode_rules, SHAPE),
    Rule(layout.zero_rules, LAYOUT),
    Rule(model.position_rules, SHAPE),
    Rule(model.family_rules, SHAPE),
    Rule(launched.variant_rules, {"model"}),
    Rule(launched.launched_rules, SHAPE | BATCH | {"cluster", "launch"}, WARNING),
    Rule(experts.expert_size_rules, SHAPE),
    Rule(experts.expert_mode_rules, SHAPE),
    Rule(experts.router_rules, {"model"}),
    Rule(experts.latent_rules, {"model"}),
    Rule(experts.overlap_rules, SHAPE | BATCH),
    Rule(experts.capacity_rules, BATCH | {"model"}),
    Rule(experts.balance_rules, {"model", "training"}, WARNING),
    Rule(model.decoder_rules, SHAPE),
    Rule(model.relative_rules, {"model"}),
    Rule(model.head_rules, SHAPE),
    Rule(tensor_mode.grid_width_rules, SHAPE),
    Rule(model.rotary_rules, {"model"}),
    Rule(model.width_rules, SHAPE),
    Rule(model.sequence_rules, SHAPE),
    Rule(context.exchange_rules, BATCH),
    Rule(context.exchanged_head_rules, SHAPE),
    Rule(context.exchanged_attention_rules, SHAPE | BATCH),
    Rule(model.length_rules, {"model"}, WARNING),
    Rule(training.batch_rules, LAYOUT | BATCH),
    Rule(tensor_mode.sample_rules, LAYOUT | BATCH),
    Rule(training.recompute_rules, BATCH),
    Rule(training.module_rules, {"training"}),
    Rule(training.attention_rules, {"cluster", "launch", "model", "training"}, WARNING),
    Rule(training.rate_rules, {"training"}),
    Rule(training.freeze_rules, {"model", "training"}),
    Rule(adapters.name_rules, {"model", "training"}),
    Rule(adapters.layout_rules, BATCH),
    Rule(adapters.base_rules, {"cluster", "training"}),
    Rule(optimizers.optimizer_rules, {"cluster", "launch", "training"}),
    Rule(optimizers.offload_rules, BATCH),
    Rule(loss.loss_rules, SHAPE | BATCH),
    Rule(chat.chat_rules, SHAPE | {"data", "training"}),
    Rule(training.dtype_rules, {"cluster", "training"}, WARNING),
    Rule(training.slow_dtype, {"cluster", "training"}, WARNING),
    Rule(gradients.gradient_rules, LAYOUT | SHAPE | BATCH, WARNING),
)
NO_VALUE = "no legal value exists while the other settings stay as they are"


def check_job(
    job: JobSpec,
    tables_with_errors: frozenset[str] = frozenset(),
    rules: Sequence[Rule] = RULES,
    draft: LayoutDraft | None = None,
) -> list[Check]:
    """Every rule's answer about a complete job, in the order in which people read a layout.

    tables_with_errors: those of the job that hold a default where the user wrote something illegal.
    A rule that reads one of them is left out, as its answer would be about the default. draft: the
    parts of the job's layout, if a plan will reuse them.
    """
    draft, checks = draft or LayoutDraft(job), list[Check]()
    for rule in rules:
        if not rule.reads & tables_with_errors:
            checks += rule.answer(draft)
    return checks


def model_issues(model: ModelSpec) -> list[Issue]:
    """Why no job can train a model, whatever its layout."""
    of_model = [rule for rule in RULES if rule.reads == {"model"}]
    return [check.issue for check in find_errors(JobSpec(model=model), of_model)]


def find_errors(job: JobSpec, rules: Sequence[Rule] = RULES, draft: LayoutDraft | None = None) -> list[Check]:
    """The errors among the answers of `check_job`; rules that only warn are not asked."""
    asked = [rule for rule in rules if rule.severity == "error"]
    return [check for check in check_job(job, rules=asked, draft=draft) if check.status == "error"]


def with_tried_hints(
    job: JobSpec, checks: Sequence[Check], open_settings: frozenset[str] = frozenset(), rules: Sequence[Rule] = RULES
) -> list[Check]:
    """The checks of a job, with hints that name only values which all rules accept.

    open_settings: those that the user left open and that follow from the others (spec/job.py);
    they are derived anew for each value that is tried.
    """
    failing = frozenset(check.rule for check in checks if check.status == "error")
    trial = _Trial(job, failing, open_settings, rules)
    return [trial.check(check) if check.offers else check for check in checks]


class _Trial(NamedTuple):
    """A job on which offered values are tried; failing: the rules that refuse it unchanged."""

    job: JobSpec
    failing: frozenset[str]
    open_settings: frozenset[str]
    rules: Sequence[Rule]

    def check(self, check: Check) -> Check:
        """The check with only those of its offered values that fix it and break nothing else."""
        offers = tuple(self._accepted(offer, check) for offer in check.offers)
        hint = way_out(offers, check.more)
        return check._replace(offers=offers, hint=hint or NO_VALUE)

    def _accepted(self, offer: Offer, check: Check) -> Offer:
        """The offer with the accepted values, at most as many as a hint names."""
        most = MOST_OFFERED if offer.near is not None else MOST_TRIED
        tried = (v for v in offer.by_nearness[:MOST_TRIED] if self._accepts(offer, v, check))
        legal = set(islice(tried, most))
        return offer._replace(values=tuple(value for value in offer.values if value in legal))

    def _accepts(self, offer: Offer, value: int | str, check: Check) -> bool:
        """Whether the job with this value keeps the check's rule, every rule about the setting and
        every rule that it keeps now."""
        settings = {offer.setting: value, **dict(offer.also)}
        job = changed_job(self.job, settings, self.open_settings)
        if job is None:
            return False
        errors = find_errors(job, self.rules)
        must_hold = {check.rule} | {error.rule for error in errors if error.where == offer.setting}
        return not any(e.rule in must_hold or e.rule not in self.failing for e in errors)
