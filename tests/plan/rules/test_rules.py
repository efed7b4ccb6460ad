"""Each rule once kept and once broken: a broken one says value, bound and a way out."""

from __future__ import annotations

import ast
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import mpctl.plan.rules
from mpctl.core.errors import Offer
from mpctl.model.pipeline.schedule import legality
from mpctl.plan.planning.plan import make_plan
from mpctl.plan.rules.check import Check, divides, way_out
from mpctl.plan.rules.sizes import is_legal_size, splits_heads
from mpctl.plan.rules.validate import check_job, find_errors
from mpctl.spec.job import JobSpec, changed_job
from mpctl.spec.load import load_job
from tests.jobs import answers, job_of
from tests.plan.rules.cases import CASES
from tests.plan.rules.cases.case import T5, TWO_NODES, Case

ALWAYS_OK = {"vocab-padding"}


def checks_of(rule: str, settings: dict[str, Any]) -> list[Check]:
    if rule in ("memory-fits", "host-memory-fits"):  # asked after the estimate, which needs every other rule kept
        return [check for check in make_plan(job_of(settings)).checks if check.rule == rule]
    return answers(rule, settings)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.where}-{case.status}")
def test_a_rule_is_silent_or_ok_when_kept(case: Case) -> None:
    assert {check.status for check in checks_of(case.rule, case.kept)} <= {"ok"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.where}-{case.status}")
def test_a_broken_rule_says_value_bound_and_way_out(case: Case) -> None:
    (check,) = [c for c in checks_of(case.rule, case.broken) if c.status != "ok"]
    assert (check.status, check.where) == (case.status, case.where)
    assert [word for word in case.says if word not in check.message] == []
    assert re.search(case.hint, check.hint), check.hint
    assert check.hint or check.status == "warning"
    if check.status == "error":  # a row that says `WARNING` in RULES would hide it from searches
        assert check in find_errors(job_of(case.broken))
    assert (check.issue.rule, check.issue.message) == (check.rule, check.message)


def test_every_rule_has_a_case() -> None:
    """Rule ids are the dashed words of rules/ and legality.py: whoever adds one adds its case."""
    sources = [*Path(mpctl.plan.rules.__file__).parent.glob("*.py"), Path(legality.__file__)]
    texts = [
        node.value
        for source in sources
        for node in ast.walk(ast.parse(source.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    ids = {text for text in texts if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", text)}
    assert ids == {case.rule for case in CASES} | ALWAYS_OK


def test_a_padded_vocabulary_is_said_and_is_never_wrong() -> None:
    (padded,) = answers("vocab-padding", {"parallel.tp": 2})
    assert "50257 tokens are padded to 50432 (128 x tp 2), 25216 rows a rank" in padded.message
    (exact,) = answers("vocab-padding", {"parallel.tp": 2, "model.vocab": 512})
    assert exact.message == "512 tokens, 256 rows a rank"
    assert (padded.status, exact.status) == ("ok", "ok")


def test_rules_of_a_model_are_silent_without_one() -> None:
    rules = {c.rule for c in make_plan(job_of(TWO_NODES, model=False)).checks}
    assert rules == {"world-size", "batch-divides"}


def test_kv_heads_that_do_not_divide_are_not_also_reported_as_heads() -> None:
    broken = {"parallel.tp": 2, "model.kv_heads": 5}
    assert [c.status for c in answers("tp-divides-heads", broken)] == ["ok"]


def test_a_size_far_beyond_the_cluster_is_answered_at_once() -> None:
    """Once a loop up to tp: the answer took minutes."""
    (check,) = answers("world-size", {**TWO_NODES, "parallel.tp": 1_000_000_007})
    assert f"a multiple of {1_000_000_007:,} nodes" in check.hint


def test_a_group_of_many_ranks_that_leaves_its_node_is_named_by_its_ends() -> None:
    wide = {"cluster.nodes": 8, "cluster.gpus_per_node": 8, "parallel.tp": 64}
    (check,) = answers("tp-within-nvlink-domain", wide, model=False)
    assert check.message.endswith("[0, 1, 2, ..., 63]")


def test_a_hint_names_the_nearest_values_in_their_order() -> None:
    assert way_out([Offer("parallel.tp", (1, 2, 4, 8, 16), "tp", near=7)]) == "use tp 2, 4 or 8"
    assert way_out([Offer("parallel.tp", (1, 2, 4, 8))], "less") == "use 1, 2, 4 or 8; or less"
    assert way_out([Offer("parallel.tp", ())], "less") == "less"


def test_divides_names_only_ways_of_a_sensible_size() -> None:
    check = divides("r", "w", 4096, 24, "things")
    assert check.hint == "use 1, 2, 4, 8, 16, 32 or 64"


@pytest.mark.parametrize("settings", [{"parallel.pp": 4}, {**T5, "parallel.pp": 3}])
def test_the_balanced_cut_is_legal_and_shortens_the_step(settings: dict[str, Any]) -> None:
    job = {
        **settings,
        "cluster": "dgx-a100",
        "cluster.nodes": 1,
        "cluster.gpus_per_node": settings["parallel.pp"],
        "training.micro_batch_size": 4,
        "training.global_batch_size": 64,
        "training.dtype": "fp32",
    }
    (check,) = [c for c in answers("stage-balance", job) if c.status == "warning"]
    balanced = {**job, "parallel.stage_balance": check.hint.split()[-1]}
    even, better = make_plan(job_of(job)).estimate, make_plan(job_of(balanced)).estimate
    assert even and better and even.step_seconds and better.step_seconds
    assert better.step_seconds < even.step_seconds


@pytest.mark.parametrize(
    "broken",
    [
        {"model.heads": 5},
        {"model.family": "t5"},
        {"model.family": "t5", "model.decoder_layers": 12},
        {"model.seq_length": 1, "parallel.cp": 2},
    ],
)
@pytest.mark.parametrize("how", ["even", "cost"])
def test_stages_of_a_model_that_cannot_be_counted_are_not(broken: dict[str, Any], how: str) -> None:
    """Other rules say what is wrong with it."""
    settings = {"parallel.pp": 2, "parallel.stage_balance": how, **broken}
    assert answers("stage-balance", settings) == []
    assert "error" in {check.status for check in make_plan(job_of(settings)).checks}


@pytest.mark.parametrize(
    ("device", "dtype", "hint"),
    [
        ("h100-sxm", "fp32", "use --dtype bf16, or tf32: 7.39 times as fast, operands rounded to 11 bits"),
        ("h100-sxm", "fp64", "use --dtype bf16"),
        ("v100-32gb", "fp32", "use --dtype fp16"),  # has no bf16
        ("h100-sxm", "bf16", None),
        ("h100-sxm", "tf32", None),
        ("cpu", "fp32", None),
    ],
)
def test_fp32_on_a_gpu_with_faster_16_bit_products(device: str, dtype: str, hint: str | None) -> None:
    found = answers("slow-dtype", {"cluster.device": device, "training.dtype": dtype})
    assert [(check.status, check.hint) for check in found] == ([("warning", hint)] if hint else [])


def errors_of(job: JobSpec) -> set[str]:
    return {check.rule for check in check_job(job) if check.status == "error"}


def test_what_a_search_asks_is_what_the_rules_decide() -> None:
    """`plan/rules/sizes.py` against the rules, for every size of an axis that fills a world."""
    models = ("gpt2", "llama-3-8b", "t5-large")
    of_heads = {"tp-divides-heads", "tp-divides-ffn", "tp-divides-kv-heads"}
    of_sequences = {"cp-divides-sequence", "cp-divides-decoder"}
    for name, size in product(models, range(1, 49)):
        cluster = {"cluster.nodes": 1, "cluster.gpus_per_node": size}
        job = load_job(None, {**cluster, "model": name})
        assert job.model is not None
        tp = changed_job(job, {"parallel.tp": size, "parallel.dp": 1}, frozenset())
        cp = changed_job(job, {"parallel.cp": size, "parallel.dp": 1}, frozenset())
        assert tp is not None and cp is not None
        assert splits_heads(job.model, size) == (not errors_of(tp) & of_heads), (name, size)
        assert is_legal_size(job, "cp", size) == (not errors_of(cp) & of_sequences), (name, size)
