"""A batch answers every line: good ones as `mpctl plan` would, bad ones with what is wrong."""

from __future__ import annotations

import io
import json
import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mpctl.plan.batch.answers import FIGURES, FIRST_LINES, NOT_SEARCHED, SEARCHED_LINES, answers, answers_by_processes
from mpctl.plan.batch.rows import LONGEST_LINE, read_lines
from mpctl.plan.planning.plan import make_plan
from mpctl.spec.load import load_job

PUBLISHED = Path(__file__).parents[2] / "recorded" / "published_runs.json"
JOB: dict[str, Any] = {
    "cluster": {"preset": "selene", "nodes": 2},
    "model": {
        "family": "gpt",
        "layers": 24,
        "hidden": 2048,
        "heads": 16,
        "vocab": 51200,
        "seq_length": 1024,
        "attention": "unfused",
    },
    "parallel": {"tp": 2, "pp": 4, "dp": 2},
    "training": {
        "micro_batch_size": 2,
        "global_batch_size": 64,
        "dtype": "fp16",
        "recompute": "full",
        "runtime": "megatron-2021",
    },
}


def line(**changes: Any) -> bytes:
    """The job with keys changed, `parallel__tp=8`."""
    job = json.loads(json.dumps(JOB))
    for where, value in changes.items():
        table, _, key = where.partition("__")
        if key:
            job[table][key] = value
        else:
            job[table] = value
    return json.dumps(job).encode()


def answer(given: bytes) -> dict[str, Any]:
    (found,) = answers([given])
    json.dumps(found, allow_nan=False)
    return found


def rules(found: dict[str, Any], status: str = "error") -> list[str]:
    return [issue["rule"] for issue in found["issues"] if issue["status"] == status]


def test_a_line_is_answered_as_plan_would() -> None:
    found = answer(line(id="a"))
    job = load_job(
        None,
        {"cluster": JOB["cluster"], "model": JOB["model"], "parallel": JOB["parallel"], "training": JOB["training"]},
    )
    plan = make_plan(job)
    assert plan.estimate is not None and not isinstance(plan.estimate.time, str)
    time = plan.estimate.time
    assert found["id"] == "a"
    assert found["step_seconds"] == time.total
    assert (found["step_seconds_low"], found["step_seconds_high"]) == (time.low, time.high)
    assert found["mfu"] == pytest.approx(found["model_tflops_per_gpu"] * 1e12 / 312e12)
    assert found["mfu"] < found["hfu"]
    assert found["tokens_per_second"] == pytest.approx(64 * 1024 / time.total)
    assert found["stage_memory_bytes"] == [m.allocated_bytes for m in plan.estimate.memory]
    assert found["peak_memory_bytes"]["allocated"] == max(found["stage_memory_bytes"])
    peaks = found["peak_memory_bytes"]
    assert peaks["allocated"] <= peaks["reserved"] <= peaks["device"]
    assert found["fits"] is True
    parts = ["compute", "tp", "pp", "dp", "bubble", "optimizer", "other", "contention"]
    assert list(found["breakdown"]) == parts
    assert math.isclose(sum(found["breakdown"].values()), time.total, rel_tol=1e-12)


def test_a_row_with_its_job_inside_is_the_job() -> None:
    flat = answer(line(id=7))
    row = {"id": 7, "job": JOB, "measured": {"step_seconds": 1.0}, "source": "a paper"}
    assert answer(json.dumps(row).encode()) == flat


BAD = [
    (b"", "empty-line"),
    (b"{", "bad-syntax"),
    (b"[]", "bad-syntax"),
    (b"3", "bad-syntax"),
    (b'{"id": NaN}', "bad-syntax"),
    (b'{"id": -Infinity}', "bad-syntax"),
    (b'{"model": ' + b"9" * 5000 + b"}", "bad-syntax"),
    (b'{"id": "\xff"}', "bad-encoding"),
    (b'{"model":' * 100_000, "bad-syntax"),
    (b'{"model":' * 300 + b"1" + b"}" * 300, "unknown-key"),
    (b'{"job": 3, "id": "x"}', "bad-value"),
    (b'{"id": {"a": 1}}', "bad-value"),
    (b"{}", "no-model"),
    (line(parallel__tp="8"), "bad-value"),
    (line(parallel__tp=True), "bad-value"),
    (line().replace(b'"tp": 2', b'"tp": 1e999'), "bad-value"),
    (line(parallel__tp=5), "world-size"),
    (line(parallel__tq=8), "unknown-key"),
    (line(colour=1), "unknown-key"),
    (line(cluster="nowhere"), "unknown-preset"),
    (line(training__runtime="abacus"), "bad-value"),
    (line(model__layers=10_000), "too-large"),
    (line(model__layers=2**31 - 1), "bad-value"),
    (line(training__global_batch_size=2**30), "too-large"),
    (line(model={"hf_config": "/dev/zero"}), "hf-config"),
    (line(training__dtype="fp8"), None),
]


@pytest.mark.parametrize(("given", "rule"), BAD, ids=map(str, range(len(BAD))))
def test_a_bad_line_has_issues_and_nulls_and_harms_no_other(given: bytes, rule: str | None) -> None:
    before, bad, after = answers([line(id=1), given, line(id=2)])
    assert before["step_seconds"] == after["step_seconds"] > 0
    assert (before["id"], after["id"]) == (1, 2)
    if rule is not None:
        assert rule in rules(bad)
        assert all(bad[key] is None for key in FIGURES)
        assert all(i["message"] and i["where"] for i in bad["issues"])
    else:
        assert bad["step_seconds"] is None and rules(bad, "warning")


def test_every_published_row_is_answered_as_it_stands_flat_or_whole() -> None:
    rows = json.loads(PUBLISHED.read_text("utf-8"))["rows"]
    whole = list(answers(json.dumps(row).encode() for row in rows))
    flat = answers(json.dumps({"id": row["id"], **row["job"]}).encode() for row in rows)
    assert whole == list(flat)
    for found in whole:
        assert rules(found) == [], found["issues"]
        low, seconds, high = (found[f"step_seconds{end}"] for end in ("_low", "", "_high"))
        assert 0 < low < seconds < high
        assert math.isclose(sum(found["breakdown"].values()), seconds, rel_tol=1e-9)
        assert all(value >= 0 for value in found["breakdown"].values())
        assert isinstance(found["fits"], bool)


def test_an_id_that_comes_again_is_told() -> None:
    first, second, third = answers([line(id="a"), line(id="a"), line(id="b")])
    assert rules(second, "warning") == ["repeated-id"]
    assert second["step_seconds"] == first["step_seconds"]
    assert not rules(first, "warning") and not rules(third, "warning")


def test_what_others_ran_is_estimated_though_it_would_not_be_launched() -> None:
    across = {"parallel__tp": 16, "parallel__pp": 1, "parallel__dp": 1}
    theirs, ours = answer(line(**across)), answer(line(**across, training__runtime="mpctl"))
    assert theirs["step_seconds"] > 0 and rules(theirs, "warning") == ["tp-within-nvlink-domain"]
    assert ours["step_seconds"] is None and rules(ours) == ["tp-within-nvlink-domain"]
    uneven = answer(line(model__layers=23))
    assert uneven["step_seconds"] > 0 and rules(uneven, "warning") == ["layers-assumed"]


def test_one_that_does_not_fit_says_what_would() -> None:
    found = answer(line(model="gpt3-175b", training__recompute="none", parallel__tp=8, parallel__pp=2, parallel__dp=1))
    assert found["fits"] is False and "memory-fits" in rules(found, "warning")


def test_only_the_first_lines_that_do_not_fit_are_searched_for_one_that_does() -> None:
    """A search takes some thirty estimates, and half of a sweep may not fit."""
    large = {**JOB["model"], "layers": 40, "hidden": 6144, "heads": 48}
    does_not_fit = line(model=large, training__recompute="none", training__micro_batch_size=4)
    *first, last = answers([does_not_fit] * (SEARCHED_LINES + 1))
    assert all(found.get("nearest_that_fit") for found in first)
    assert last["fits"] is False and "nearest_that_fit" not in last
    hints = [issue["hint"] for issue in last["issues"] if issue["rule"] == "memory-fits"]
    assert hints == [NOT_SEARCHED]


def test_a_line_far_down_is_not_searched_for_one_that_fits() -> None:
    large = {**JOB["model"], "layers": 40, "hidden": 6144, "heads": 48}
    does_not_fit = line(model=large, training__recompute="none", training__micro_batch_size=4)
    *_, last = answers([line()] * FIRST_LINES + [does_not_fit])
    assert last["fits"] is False and "nearest_that_fit" not in last


def test_several_processes_answer_as_one_in_the_order_of_the_lines() -> None:
    rows = [json.loads(line(parallel__dp=dp)) | {"id": f"row {dp % 100}"} for dp in range(1, 150)]
    lines = [json.dumps(row).encode() for row in rows]
    assert list(answers_by_processes(lines, Path(), 2)) == list(answers(lines))


def test_a_long_line_is_passed_over_without_being_held() -> None:
    stream = io.BytesIO(line(id=1) + b"\r\n" + b"x" * (3 * LONGEST_LINE) + b"\n" + line(id=2))
    one, long, two = answers(read_lines(stream))
    assert (one["id"], two["id"]) == (1, 2) and rules(long) == ["line-too-long"]
    exact = io.BytesIO(b" " * (LONGEST_LINE - 2) + b"{}\n{}")
    assert [len(given or b"") for given in read_lines(exact)] == [LONGEST_LINE, 2]


def test_a_million_lines_are_taken_one_at_a_time() -> None:
    read = 0

    def endless() -> Any:
        nonlocal read
        while True:
            read += 1
            yield line(id=read)

    assert len(list(islice(answers(endless()), 3))) == 3
    assert read == 3


@pytest.mark.parametrize("figure", [1e-300, 5e-324, 1e308])
def test_a_figure_beyond_its_bounds_is_one_issue_and_the_next_line_is_answered(figure: float) -> None:
    cluster = {"preset": "selene", "nodes": 2, "intra_node": {"bandwidth": figure}}
    bad, after = answers([line(cluster=cluster), line(id=2)])
    assert rules(bad) == ["bad-value"] and after["step_seconds"] > 0


@pytest.mark.parametrize("found", [{"mfu": math.inf}, {"breakdown": {"tp": math.nan}}])
def test_a_figure_that_json_cannot_hold_is_an_issue(found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpctl.plan.batch.answers.figures", lambda plan: found)
    bad = answer(line())
    assert rules(bad) == ["not-estimated"] and all(bad[key] is None for key in FIGURES)


def test_an_unexpected_error_is_named_as_one_and_ends_only_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(job: Any) -> Any:
        raise AssertionError("out of step") if job.model.layers == 25 else LookupError("gone")

    monkeypatch.setattr("mpctl.plan.batch.answers.make_plan", failing)
    said = ["AssertionError: out of step", "LookupError: gone"]
    for found, name in zip(answers([line(model__layers=25), line()]), said, strict=True):
        (issue,) = found["issues"]
        assert issue["rule"] == "unexpected-error"
        assert issue["message"] == f"mpctl failed on this line: {name}"


@pytest.mark.parametrize("balance", ["even", "cost"])
def test_heads_that_do_not_divide_are_said_so_whatever_the_runtime(balance: str) -> None:
    found = answer(line(model__heads=17, parallel__tp=1, parallel__dp=4, parallel__stage_balance=balance))
    assert rules(found) == ["heads-divide-hidden"]
