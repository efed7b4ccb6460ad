"""Every error at once: rules do not stop one another, nor does the schema stop the rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mpctl.core.errors import InputError, Issue, Offer
from mpctl.model.layout.draft import LayoutDraft
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.planning.plan import load_plan, make_plan
from mpctl.plan.rules.check import Check, refusal
from mpctl.plan.rules.validate import RULES, Rule, check_job, with_tried_hints
from mpctl.spec.load import load_job, load_partial
from tests.jobs import GPT, job_of

SIX_FAULTS: dict[str, Any] = {
    "cluster.nodes": 2,
    "cluster.gpus_per_node": 8,
    "parallel.tp": 5,  # divides neither 16 ranks nor 12 heads nor 3073 columns
    "parallel.order": "tp-tp-dp-pp",
    "parallel.vpp": 2,
    "model.ffn": 3073,
    "model.max_positions": 100,
    "training.micro_batch_size": 4,
    "training.global_batch_size": 18,
}
THEIR_RULES = {
    "world-size",
    "axis-order",
    "vpp-needs-pp",
    "tp-divides-heads",
    "tp-divides-ffn",
    "max-positions",
    "batch-divides",
    "tp-divides-kv-heads",
}


def issues_of(settings: dict[str, Any]) -> list[Issue]:
    with pytest.raises(InputError) as caught:
        load_plan(None, {**GPT, **settings})
    return list(caught.value.issues)


def test_every_fault_is_an_issue_of_its_own() -> None:
    issues = issues_of(SIX_FAULTS)
    assert sorted(issue.rule for issue in issues) == sorted(THEIR_RULES)
    assert all(issue.where and issue.message and issue.hint for issue in issues)


def test_schema_faults_in_other_tables_hide_no_rule() -> None:
    faults = {"paralel.tp": 2, "data.max_byte": 5, "launch.timeout_seconds": "long", "name": 5}
    issues = issues_of({**SIX_FAULTS, **faults})
    by_where = {issue.where: issue.rule for issue in issues if issue.rule not in THEIR_RULES}
    assert by_where == {
        "paralel": "unknown-key",
        "data.max_byte": "unknown-key",
        "launch.timeout_seconds": "bad-value",
        "name": "bad-value",
    }
    assert {issue.rule for issue in issues} >= THEIR_RULES


def test_an_unknown_key_hides_no_rule_of_its_own_table() -> None:
    rules = {issue.rule for issue in issues_of({**SIX_FAULTS, "parallel.tpp": 1})}
    assert rules == THEIR_RULES | {"unknown-key"}


def test_rules_that_read_a_table_with_errors_are_left_out() -> None:
    """A batch rule would answer about the default that stands where `"many"` was written."""
    issues = issues_of({**SIX_FAULTS, "training.micro_batch_size": "many"})
    rules = {issue.rule for issue in issues}
    assert "batch-divides" not in rules
    assert {"world-size", "axis-order", "tp-divides-heads", "bad-value"} <= rules


def test_an_unknown_model_preset_still_lets_the_layout_be_checked() -> None:
    with pytest.raises(InputError) as caught:
        load_plan(None, {"model": "gtp2", "cluster.nodes": 2, "cluster.gpus_per_node": 8, "parallel.tp": 3})
    assert [issue.rule for issue in caught.value.issues] == ["unknown-preset", "world-size"]


def test_checks_come_in_the_order_in_which_people_read_a_layout() -> None:
    rules = [check.rule for check in check_job(job_of({"parallel.tp": 2, "parallel.dp": 2}))]
    assert rules == [
        "world-size",
        "tp-within-nvlink-domain",
        "layers-per-stage",
        "tp-divides-heads",
        "tp-divides-ffn",
        "vocab-padding",
        "batch-divides",
    ]


def test_make_plan_never_raises_and_leaves_out_what_cannot_be_known() -> None:
    plan = make_plan(job_of(SIX_FAULTS))
    assert {check.rule for check in plan.errors} == THEIR_RULES
    assert (plan.topology, plan.stages, plan.estimate) == (None, None, None)
    with pytest.raises(InputError) as caught:
        plan.require_legal()
    assert len(caught.value.issues) == len(THEIR_RULES)


def test_warnings_do_not_stop_a_plan() -> None:
    plan = make_plan(job_of({"parallel.zero": 1}))
    assert [check.rule for check in plan.warnings] == ["zero-needs-dp"]
    assert plan.require_legal().world_size == 1
    assert plan.estimate is not None


def test_a_plan_is_made_of_what_its_rules_computed() -> None:
    """One table, one cut of the layers and one topology serve the rules and the plan."""
    job = load_job(None, {"nodes": 2, "gpus_per_node": 8, "tp": 2, "pp": 4, "model": "gpt2"})
    draft = LayoutDraft(job)
    checks = check_job(job, draft=draft)
    assert {"topology", "stages", "table", "costs"} <= vars(draft).keys()
    plan = make_plan(job, checks, draft)
    assert plan.layout is not None and plan.layout.table is draft.table
    assert plan.layout.topology is plan.topology is draft.topology
    assert plan.layout.stages == JobLayout.of(job).stages


TWO_NODES = {"cluster.nodes": 2, "cluster.gpus_per_node": 4, "model": "gpt2"}


def even_tp(draft: LayoutDraft) -> Iterator[Check]:
    """A toy rule: tp is even. Its offer holds values that other rules refuse."""
    tp = draft.job.parallel.tp
    if tp % 2 == 0:
        yield Check("even-tp", "ok", "parallel.tp", f"{tp} is even")
    else:
        offer = Offer("parallel.tp", (2, 3, 4, 8), "tp")
        yield refusal("even-tp", "parallel.tp", f"{tp} is odd", offer)


RULES_AND_TOY = (*RULES, Rule(even_tp, {"parallel"}))


def test_it_is_asked_unless_its_table_has_errors() -> None:
    loaded = load_partial(None, TWO_NODES)
    assert loaded.job is not None
    rules = {check.rule for check in check_job(loaded.job, rules=RULES_AND_TOY)}
    assert "even-tp" in rules
    with_errors = frozenset({"parallel"})
    assert "even-tp" not in {c.rule for c in check_job(loaded.job, with_errors, RULES_AND_TOY)}
    assert "even-tp" not in {check.rule for check in check_job(loaded.job)}


def test_its_values_are_tried_by_every_rule() -> None:
    """3 is odd; 8 leaves a node of 4 GPUs and does not divide 12 heads."""
    loaded = load_partial(None, TWO_NODES)
    assert loaded.job is not None
    checks = [c for c in check_job(loaded.job, rules=RULES_AND_TOY) if c.status == "error"]
    assert [check.hint for check in checks] == ["use tp 2, 3, 4 or 8"]
    (tried,) = with_tried_hints(loaded.job, checks, loaded.open_settings, RULES_AND_TOY)
    assert tried.hint == "use tp 2 or 4"


def test_other_rules_hints_are_tried_by_it() -> None:
    """tp 3 breaks the world size as well; of its offer 1, 2 or 4 the toy rule leaves 2 and 4."""
    settings = {**TWO_NODES, "parallel.tp": 3}
    with pytest.raises(InputError) as caught:
        load_plan(None, settings, RULES_AND_TOY)
    world = next(issue for issue in caught.value.issues if issue.rule == "world-size")
    assert world.hint.startswith("use tp 2 or 4")


def test_a_plan_has_its_answer() -> None:
    plan = load_plan(None, {**TWO_NODES, "parallel.tp": 2}, RULES_AND_TOY)
    assert [check.message for check in plan.checks if check.rule == "even-tp"] == ["2 is even"]
