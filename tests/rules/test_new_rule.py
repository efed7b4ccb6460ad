"""A rule is one row of a table: then it is asked, its hints are tried, a plan has its answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpctl.errors import InputError, Offer
from mpctl.planning.plan import load_plan
from mpctl.rules.check import Check, refusal
from mpctl.rules.validate import RULES, Rule, check_job, with_tried_hints
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_partial

TWO_NODES = {"cluster.nodes": 2, "cluster.gpus_per_node": 4, "model": "gpt2"}


def even_tp(job: JobSpec) -> Iterator[Check]:
    """A toy rule: tp is even. Its offer holds values that other rules refuse."""
    tp = job.parallel.tp
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
