"""What the page's controls are answered, beside what commands say."""

from __future__ import annotations

import pytest

from mpctl.cli.options import JobSource
from mpctl.cli.ui.answers import LONGEST, choices, controls_of, emit_answer, plan_answer, search_answer, source_of
from mpctl.core.errors import InputError
from mpctl.plan.planning.plan import load_plan
from mpctl.plan.planning.summary import headline_figures, step_text

LLAMA = {"model": "llama-3-8b", "gpus": "8xh100", "runtime": "megatron-core", "tp": "4", "global-batch-size": "64"}


def test_a_plan_is_the_plan_of_its_command() -> None:
    answer = plan_answer(LLAMA)
    job = source_of(LLAMA)
    plan = load_plan(job.source, job.overrides)
    assert plan.estimate is not None and answer["status"] == ("fits" if plan.fits else "over")
    assert answer["seconds"] == plan.estimate.time.total and answer["step"] == step_text(plan.estimate.time)
    assert answer["figures"] == dict(headline_figures(plan))
    assert answer["command"] == (
        "mpctl plan --model llama-3-8b --runtime megatron-core --tp 4 --global-batch-size 64 --gpus 8xh100"
    )
    assert "<svg" in answer["html"] and "<script" not in answer["html"]
    assert controls_of(job) == LLAMA


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
def test_rows_of_a_search_are_plans_of_their_controls() -> None:
    rows = search_answer(LLAMA)["rows"]
    assert len(rows) >= 3
    for row in rows[:3]:
        answer = plan_answer(row["controls"])
        assert answer["seconds"] == pytest.approx(row["seconds"]) and answer["status"] == "fits"


def test_flags_and_job_files() -> None:
    assert "--tensor-model-parallel-size 4" in emit_answer(LLAMA, "megatron")["text"]
    assert "tp = 4" in emit_answer(LLAMA, "toml")["text"]
    with pytest.raises(InputError):
        emit_answer({**LLAMA, "tp": "3"}, "megatron")


def test_no_setting_of_a_command_line_is_dropped() -> None:
    assert controls_of(JobSource("demo", {"parallel.tp": 2})) == {"job": "demo", "tp": "2"}
    lora = {"training.adapter.kind": "lora", "training.adapter.rank": 8}
    assert controls_of(JobSource(None, lora)) == {"lora": "8"}
    with pytest.raises(InputError) as caught:
        controls_of(JobSource("demo", {"training.moe_load": 1.1, "training.tiled_mlp": 2}))
    assert [issue.where for issue in caught.value.issues] == ["training.moe_load", "training.tiled_mlp"]
