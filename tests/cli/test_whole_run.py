"""A run of many tokens: its days and cost from the plan's step, and what failures add."""

from __future__ import annotations

import csv
import json
from dataclasses import astuple
from math import ceil, isfinite
from pathlib import Path
from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.plan.planning.plan import load_plan
from mpctl.plan.planning.summary import main_figures
from mpctl.plan.planning.whole_run import WholeRun, plan_whole_run, read_tokens, run_figures
from mpctl.plan.search.evaluate import LayoutEvaluator
from mpctl.plan.search.find import find_layouts
from mpctl.plan.search.request import read_request
from mpctl.plan.search.result import cost_of, layout_reports, search_layouts
from mpctl.render.search import run_cells, whole_run_text
from tests.cli.calls import Mpctl

LLAMA = {
    "cluster": "llama3-h100",
    "model": "llama-3-70b",
    "nodes": 256,
    "tp": 8,
    "pp": 4,
    "global_batch_size": 1024,
    "runtime": "megatron-core",
    "zero": 1,
    "sequence_parallel": True,
}
COMMAND = [
    "plan",
    "--cluster",
    "llama3-h100",
    "--model",
    "llama-3-70b",
    "--nodes",
    "256",
    "--tp",
    "8",
    "--pp",
    "4",
    "--global-batch-size",
    "1024",
    "--runtime",
    "megatron-core",
    "--zero",
    "1",
    "--sequence-parallel",
    "--tokens",
    "15T",
]


def run_of(tokens: int = 10**12, **settings: Any) -> WholeRun:
    return plan_whole_run(load_plan(None, {**LLAMA, **settings}), tokens)


def words(run: WholeRun) -> dict[str, str]:
    return dict(run_figures(run))


def test_days_and_gpu_hours_are_steps_of_the_plan() -> None:
    plan = load_plan(None, LLAMA)
    assert plan.estimate is not None and plan.estimate.step_seconds is not None
    run = plan_whole_run(plan, 10**12)
    assert run.steps == ceil(10**12 / plan.estimate.layout.tokens_per_step)
    assert run.days_ideal * 86_400 == pytest.approx(run.steps * plan.estimate.step_seconds)
    assert run.gpu_hours_ideal == pytest.approx(run.days_ideal * 24 * 2048)
    for ideal, real in (
        (run.days_ideal, run.days),
        (run.gpu_hours_ideal, run.gpu_hours),
        (run.watt_hours_ideal, run.watt_hours),
    ):
        assert ideal and real and ideal / real == pytest.approx(run.useful)
    assert run.days_low < run.days < run.days_high
    assert run.useful + run.saves + run.lost + run.down == pytest.approx(1)
    assert run.failures == pytest.approx(run.days * 24 / run.mtbf_hours)


def test_llama_3_405b_fails_as_often_as_it_did() -> None:
    """466 interruptions in 54 days of 16,384 GPUs, 419 of them unexpected; 30.84M GPU-hours."""
    run = run_of(
        15_600_000_000_000, model="llama-3.1-405b", nodes=2048, pp=16, vpp=8, global_batch_size=2048, headroom=0
    )
    assert 54 * 24 / run.mtbf_hours == pytest.approx(419, rel=0.01)
    assert run.useful > 0.9
    assert run.gpu_hours == pytest.approx(30.84e6, rel=0.25)


def test_own_figures_of_a_cluster_count() -> None:
    base = run_of()
    own = run_of(
        **{
            "cluster.operations.gpu_mtbf_hours": 7_900.0,
            "cluster.operations.node_mtbf_hours": 1_760.0,
            "cluster.operations.price_per_gpu_hour": 2.0,
            "cluster.operations.watts_per_gpu": 1000.0,
            "cluster.operations.pue": 1.5,
            "cluster.operations.storage_write": 1e9,
            "cluster.operations.storage_read": 2e9,
            "cluster.operations.restart_seconds": 10.0,
            "cluster.operations.detect_seconds": 1.0,
        }
    )
    assert own.mtbf_hours == pytest.approx(base.mtbf_hours / 10)
    assert base.price is None and own.price == pytest.approx(2 * own.gpu_hours)
    assert own.watt_hours == pytest.approx(1500 * own.gpu_hours)
    assert base.watt_hours == pytest.approx(700 * 1.38 * 1.1 * base.gpu_hours)
    assert own.write_seconds == pytest.approx(own.checkpoint_bytes / 1e9)
    assert own.restart_seconds == pytest.approx(11 + own.checkpoint_bytes / 2e9)
    assert own.spare_nodes > base.spare_nodes


def test_the_checkpoint_interval_is_said_and_the_best_one() -> None:
    none = run_of()
    assert none.interval_steps == none.best_interval_steps
    assert f"checkpoint.interval = {none.best_interval_steps}" in words(none)["checkpoints"]
    near = run_of(**{"checkpoint.interval": none.best_interval_steps + 2})
    assert "as good as the best" in words(near)["checkpoints"]
    far = run_of(**{"checkpoint.interval": 1000})
    assert far.useful < none.useful == far.useful_at_best
    said = words(far)["checkpoints"]
    assert "every 1,000 steps" in said and f"{none.useful:.1%} useful instead of" in said
    waits = run_of(**{"checkpoint.asynchronous": False})
    assert waits.pause_seconds == pytest.approx(none.pause_seconds + none.write_seconds)
    assert waits.best_interval_steps > none.best_interval_steps


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, None),  # 100 steps, before which nothing fails
        ({"steps": 100_000}, "none before the end; best every "),
        ({"steps": 100_000, "checkpoint.interval": 60}, None),
        ({"steps": 100_000, "checkpoint.interval": 5000}, "every 5,000 steps ("),
    ],
)
def test_a_plan_says_how_often_to_save_where_that_matters(settings: dict[str, Any], said: str | None) -> None:
    found = dict(main_figures(load_plan(None, {**LLAMA, **settings}))).get("saving")
    assert found is said is None or (said and found and found.startswith(said))


def test_elastic_runs_go_on_with_fewer_nodes() -> None:
    """dp 64 in replicas of 4 nodes; the batch of 1,024 is divided by powers of two only, so that
    one node away halves what is computed, while a batch of 64 x 63 x 5 loses a replica."""
    halved = run_of()
    assert halved.useful_elastic is not None and halved.useful_elastic < 0.8
    finer = run_of(global_batch_size=64 * 63 * 5)
    assert finer.useful_elastic is not None and finer.useful_elastic > 0.95
    elastic = run_of(global_batch_size=64 * 63 * 5, **{"launch.elastic": True})
    assert elastic.useful == finer.useful_elastic
    assert elastic.spare_nodes == 0 < finer.spare_nodes
    assert "of the work" in words(elastic)["useful"]
    assert run_of(nodes=4).useful_elastic is None  # one replica cannot shrink


@pytest.mark.parametrize("elastic", [False, True])
def test_a_run_that_is_never_done_says_so(elastic: bool) -> None:
    """Within the bounds of every figure all is finite."""
    run = run_of(
        10**18,
        **{
            "cluster.operations.gpu_mtbf_hours": 0.1,
            "cluster.operations.repair_hours": 1e4,
            "cluster.operations.storage_write": 1e3,
            "cluster.operations.detect_seconds": 1e7,
            "cluster.operations.restart_seconds": 1e7,
            "launch.elastic": elastic,
            "global_batch_size": 64 * 63 * 5,
        },
    )
    assert "never done: one in " in words(run)["time"]
    assert all(isfinite(value) for value in astuple(run) if isinstance(value, float))


def test_a_short_run_needs_no_checkpoint_before_its_end() -> None:
    run = run_of(10**7)
    assert run.steps == 2 and "at the end is enough" in words(run)["checkpoints"]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("15T", 15 * 10**12),
        ("300B", 3 * 10**11),
        ("1.4e12", 14 * 10**11),
        ("7 M", 7_000_000),
        ("1000", 1000),
        ("0.5k", 500),
    ],
)
def test_forms_of_a_number_of_tokens(text: str, tokens: int) -> None:
    assert read_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "T", "-1B", "15 GB", "0", "1e30", "15 Tok", "nan", "1_0"])
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(InputError) as raised:
        read_tokens(text)
    assert "15T, 300B or 1.4e12" in raised.value.issues[0].hint


def test_text_json_and_page_tell_the_same_run(mpctl: Mpctl, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    text = mpctl(*COMMAND, "--html", page).out
    document = json.loads(mpctl(*COMMAND, "--json").out)
    run = WholeRun(**document["run"])
    assert run.tokens == 15 * 10**12
    drawn = page.read_text("utf-8")
    for name, words_of in run_figures(run):
        assert " ".join(words_of.split()) in " ".join(text.split()), name
        assert words_of.replace("'", "&#x27;") in drawn, name
    assert "--tokens 15T" in drawn
    assert "run" not in json.loads(mpctl(*COMMAND[:-2], "--json").out)


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        (["--nodes", "2", "--gpus-per-node", "8"], "no-model"),
        (["--model", "gpt2", "--nodes", "1", "--gpus-per-node", "2"], "no-step-time"),
        (["demo", "--compare", "demo"], "usage"),
    ],
)
def test_what_has_no_run(mpctl: Mpctl, more: list[str], rule: str) -> None:
    assert rule in mpctl("plan", *more, "--tokens", "1T", "--json").issues


SMALL = {"cluster": "dgx-h100", "nodes": 2, "model": "gpt2", "global_batch_size": 64, "runtime": "megatron-core"}


@pytest.mark.slow
def test_days_and_energy_prefer_what_they_name() -> None:
    days = search_layouts(None, SMALL, objective="days", gpus=[2, 16], tokens=10**10, top=1)
    energy = search_layouts(None, SMALL, objective="energy", gpus=[2, 16], tokens=10**10, top=1)
    for found, objective in ((days, "days"), (energy, "energy")):
        costs = {g: cost_of(c, objective) for g, c in found.by_gpus.items() if c is not None}
        assert found.rows[0].job.world_size == min(costs, key=lambda gpus: costs[gpus])
    assert days.rows[0].job.world_size == 16
    assert energy.rows[0].job.world_size == 2


@pytest.mark.parametrize(
    ("objective", "settings", "rule"),
    [
        ("days", {}, "no-tokens"),
        ("energy", {}, "no-tokens"),
        ("energy", {"cluster": "this-machine", "nodes": 1, "runtime": "mpctl"}, "no-power"),
    ],
)
def test_objectives_that_lack_a_figure(objective: Any, settings: Any, rule: str) -> None:
    tokens = 10**9 if rule == "no-power" else None
    with pytest.raises(InputError) as raised:
        search_layouts(None, {**SMALL, **settings}, objective=objective, tokens=tokens)
    assert raised.value.issues[0].rule == rule


def test_the_fastest_layout_is_that_of_least_days() -> None:
    request = read_request(None, {**SMALL, "nodes": 1}, [], {"pp": 2}, None, 10**10)
    evaluator = LayoutEvaluator(request.space())
    found = find_layouts(evaluator.space, top=3, evaluator=evaluator)
    best = layout_reports(evaluator, found.best[:1], request)[0]
    every = layout_reports(evaluator, found.evaluated, request)
    assert len(every) > 20
    least = min(report.run.days for report in every if report.run and report.fits)
    assert best.run is not None and best.run.days <= least * 1.011  # ALIKE, and saves


def test_a_search_tells_the_same_run_everywhere(mpctl: Mpctl, tmp_path: Path) -> None:
    """In words, as JSON, in the table of CSV and on the page, with the price of a GPU-hour."""
    sheet, page = tmp_path / "found.csv", tmp_path / "found.html"
    command = [
        "search",
        "--cluster",
        "dgx-h100",
        "--nodes",
        "1",
        "--model",
        "gpt2",
        "--runtime",
        "megatron-core",
        "--global-batch-size",
        "64",
        "--gpus",
        "1,8",
        "--top",
        "1",
        "--tokens",
        "10B",
        "--objective",
        "days",
        "--price",
        "2.5",
    ]
    found = json.loads(mpctl(*command, "--csv", sheet, "--html", page, "--json").out)
    best = found["fastest"]
    run = WholeRun(**best["run"])
    assert best["gpus"] == 8 and run.price == pytest.approx(2.5 * run.gpu_hours)
    assert run.gpu_hours_ideal == pytest.approx(10 * best["gpu_hours_per_billion_tokens"], rel=1e-3)
    text, drawn = mpctl(*command).out, page.read_text("utf-8")
    told = whole_run_text(best["run"])
    assert f"{run.useful:.1%} of the time useful" in told
    for entry in found["by_gpus"]:
        for cell in run_cells(entry):
            assert cell in text and cell in drawn
    assert told in text and told in drawn and "--tokens 10B" in drawn
    rows = list(csv.DictReader(sheet.open()))
    assert float(rows[0]["run_days"]) == run.days
    assert float(rows[0]["run_price"]) == run.price
