"""What the page's controls are answered, beside what commands say."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

from mpctl.cli.options import JobSource
from mpctl.cli.ui.answers import LONGEST, choices, controls_of, emit_answer, plan_answer, source_of
from mpctl.cli.ui.layouts import compare_answer, search_answer
from mpctl.core.errors import InputError
from mpctl.core.units import count_text, days_text
from mpctl.plan.planning.plan import load_plan
from mpctl.plan.planning.summary import headline_figures, step_text
from mpctl.plan.planning.whole_run import plan_whole_run
from mpctl.render.plan_map import layout_data

LLAMA = {"model": "llama-3-8b", "gpus": "8xh100", "runtime": "megatron-core", "tp": "4", "global-batch-size": "64"}


def test_a_plan_is_the_plan_of_its_command() -> None:
    answer = plan_answer(LLAMA)
    job = source_of(LLAMA)
    plan = load_plan(job.source, job.overrides)
    assert plan.estimate is not None and answer["status"] == ("fits" if plan.fits else "over")
    assert answer["step"] == step_text(plan.estimate.time)
    assert answer["figures"] == dict(headline_figures(plan))
    assert answer["command"] == (
        "mpctl plan --model llama-3-8b --runtime megatron-core --tp 4 --global-batch-size 64 --gpus 8xh100"
    )
    assert "<svg" in answer["html"] and "<script" not in answer["html"]
    assert controls_of(job) == LLAMA
    assert answer["run"] == "" and answer["data"] == layout_data(plan, plan.require_legal())
    for section in ("Schedule", "Traffic of one step", "Colour by group"):
        assert section in answer["html"]


def test_a_run_has_days_and_price() -> None:
    asked = {**LLAMA, "tokens": "1T", "price": "2.5"}
    answer = plan_answer(asked)
    job = source_of(asked)
    run = plan_whole_run(load_plan(job.source, job.overrides), 10**12)
    assert run.price is not None and run.price == pytest.approx(2.5 * run.gpu_hours)
    assert answer["run"].startswith(f"{days_text(run.days)}, ") and f"price {count_text(run.price)}" in answer["run"]
    assert answer["command"].endswith("--price 2.5 --gpus 8xh100 --tokens 1T") and "The whole run" in answer["html"]
    assert controls_of(job, "1T") == asked
    assert plan_answer({**LLAMA, "tokens": "many"})["issues"][0]["control"] == "tokens"


def test_pins_say_what_differs_and_why() -> None:
    html = compare_answer([LLAMA, {**LLAMA, "tp": "2", "tokens": "1T"}])["html"]
    assert "1: tp 4 x dp 2" in html and "<td" in html and "≠ 2" in html
    for words in ("time: tp", "Compared with 1: ", "2: ", "faster (tp −", "more memory", "1T tokens: "):
        assert words in html
    with pytest.raises(InputError) as caught:
        compare_answer([LLAMA, {**LLAMA, "tp": "3"}])
    assert caught.value.issues[0].where.startswith("pin 2: ")


def test_a_refusal_names_its_control() -> None:
    answer = plan_answer({**LLAMA, "tp": "3"})
    assert answer["status"] == "illegal" and answer["html"] == ""
    assert answer["issues"][0]["control"] in ("tp", "")
    assert plan_answer({**LLAMA, "gpus": "8xh"})["issues"][0]["control"] == "gpus"


@pytest.mark.parametrize(
    "word", ["NaN", "1e99", "-1", "99999999999999999999", "<img src=x>", "a" * (LONGEST + 1), "\x00"]
)
@pytest.mark.parametrize("name", ["tp", "seq-length", "model", "gpus", "runtime", "lora"])
def test_hostile_words_are_refused_in_words(name: str, word: str) -> None:
    answer = plan_answer({**LLAMA, name: word})
    assert answer["status"] == "illegal" and answer["issues"] and answer["html"] == ""


def test_choices_have_the_rules_words() -> None:
    found = choices(LLAMA)
    assert found["tp"]["4"] == "" and "16" not in found["tp"]
    assert "does not divide" in found["pp"]["8"] and found["zero"]["1"] == ""
    assert choices({"gpus": "8xnothing"}) == choices(LLAMA, lambda: True) == {}


@pytest.mark.slow
def test_rows_and_points_of_a_search_are_plans_of_their_controls() -> None:
    stages = list[str]()
    asked = {name: word for name, word in LLAMA.items() if name != "global-batch-size"}  # its default: of tp 4, dp 2
    found = search_answer(asked, lambda stage, done, total: stages.append(stage))
    assert found["fastest"]["global-batch-size"] == "2"
    marks = [unescape(words) for words in re.findall("<title>([^<]*)", found["html"])]
    assert stages and len(marks) > 20 and set(marks) <= set(found["loads"])
    for words in marks[:3]:
        answer = plan_answer(found["loads"][words])
        assert answer["status"] == "fits" and f", {answer['figures']['step time']}, " in words
    best = plan_answer(found["fastest"])["figures"]["step time"]
    assert f">{best}<" in found["html"]


def test_flags_and_job_files() -> None:
    assert "--tensor-model-parallel-size 4" in emit_answer(LLAMA, "megatron")["text"]
    assert "tp = 4" in emit_answer(LLAMA, "toml")["text"]
    with pytest.raises(InputError):
        emit_answer({**LLAMA, "tp": "3"}, "megatron")


def test_no_setting_of_a_command_line_is_dropped() -> None:
    assert controls_of(JobSource("demo", {"parallel.tp": 2})) == {"job": "demo", "tp": "2"}
    placed = JobSource("demo", {"parallel.schedule": "zb-h1", "parallel.cp_a2a_size": 2})
    assert source_of(controls_of(placed)) == placed
    lora = {"training.adapter.kind": "lora", "training.adapter.rank": 8}
    assert controls_of(JobSource(None, lora)) == {"lora": "8"}
    with pytest.raises(InputError) as caught:
        controls_of(JobSource("demo", {"training.moe_load": 1.1, "training.tiled_mlp": 2}))
    assert [issue.where for issue in caught.value.issues] == ["training.moe_load", "training.tiled_mlp"]


def test_a_row_that_leaves_out_what_the_file_sets_can_be_loaded(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        '[cluster]\npreset = "dgx-h100"\nnodes = 1\n[model]\npreset = "gpt2"\n[parallel]\nzero = 1\nzero_size = 2\n'
        '[training]\nruntime = "megatron-core"\nglobal_batch_size = 8\n',
        "utf-8",
    )
    loads = search_answer({"job": str(job)})["loads"]
    unset = [controls for controls in loads.values() if controls.get("zero-size") == "null"]
    assert unset and plan_answer(unset[0])["status"] == "fits"


def test_pins_of_an_open_batch_share_one() -> None:
    open_ = {"model": "llama-3-8b", "gpus": "8xh100", "runtime": "megatron-core", "zero": "1"}
    html = compare_answer([{**open_, "tp": "2"}, {**open_, "tp": "4"}])["html"]
    assert "one-global-batch: 4 for all" in html
