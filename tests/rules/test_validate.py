"""Every error at once: rules do not stop one another, nor does the schema stop the rules."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.errors import InputError, Issue
from mpctl.layout.draft import LayoutDraft
from mpctl.layout.job_layout import JobLayout
from mpctl.planning.plan import load_plan, make_plan
from mpctl.rules.validate import check_job
from mpctl.spec.load import load_job
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
        load_plan(None, {"model": "gtp2", "cluster.nodes": 2, "cluster.gpus_per_node": 8,
                         "parallel.tp": 3})  # fmt: skip
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
