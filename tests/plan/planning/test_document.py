"""The plan as data and as tables: the parts of two stacks that stages hold, and the messages
between stages."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.plan.estimate.step import PARTS
from mpctl.plan.planning.document import plan_document, rank_document
from mpctl.plan.planning.plan import load_plan, make_plan
from mpctl.plan.planning.summary import main_figures, training_line, training_settings
from mpctl.render.plan import PlanView, print_plan
from tests.jobs import job_of

T5: dict[str, Any] = {
    "model.family": "t5",
    "model.position": "relative",
    "model.layers": 6,
    "model.decoder_layers": 6,
    "model.decoder_seq_length": 128,
}
PIPE: dict[str, Any] = {
    "cluster": "dgx-a100",
    "cluster.nodes": 1,
    "cluster.gpus_per_node": 3,
    "parallel.pp": 3,
    "training.global_batch_size": 4,
    "training.dtype": "fp32",
}


def document(settings: dict[str, Any]) -> dict[str, Any]:
    plan = make_plan(job_of(settings))
    return plan_document(plan, plan.require_legal(), kinds=None, ranks=True)


def test_stages_of_a_t5_say_which_layers_are_whose() -> None:
    """12 layers over 3 stages: 4 of the encoder; 2 of it and 2 of the decoder; 4 of the decoder."""
    found = document({**PIPE, **T5})
    stacks = [
        {"encoder": [[0, 4]], "decoder": []},
        {"encoder": [[4, 6]], "decoder": [[0, 2]]},
        {"encoder": [], "decoder": [[2, 6]]},
    ]
    assert found["stages"] == [[[0, 4]], [[4, 8]], [[8, 12]]]
    assert found["stage_stacks"] == stacks
    assert [rank["stacks"] for rank in found["ranks"]] == stacks
    plan = make_plan(job_of({**PIPE, **T5}))
    assert rank_document(plan, plan.require_legal(), 1)["stacks"] == stacks[1]


MIXTURE: dict[str, Any] = {
    "cluster": "dgx-h100",
    "model": "qwen3-30b-a3b",
    "cluster.nodes": 8,
    "parallel.pp": 2,
    "parallel.vpp": 4,
    "parallel.ep": 8,
    "parallel.zero": 1,
    "training.global_batch_size": 512,
    "training.runtime": "megatron-core",
}


def test_experts_are_held_at_more_than_balanced_routing() -> None:
    """The layout fits where routing is balanced, and not with 1.2 times the mean on one rank. Time is stated
    as the runtime was fitted; a stated load is that of both."""
    plans = [load_plan(None, {**MIXTURE, **own}) for own in ({}, {"training.moe_load": 1.2})]
    found, stated = [plan_document(plan, plan.require_legal(), kinds=(), ranks=False) for plan in plans]
    memory, time = found["memory"], found["time"]
    fullest = max(stage["device_bytes"] for stage in memory["stages"])
    assert memory["balanced"]["fits"] and not memory["loaded"]["fits"] and found["fits"] is False
    assert fullest == memory["loaded"]["device_bytes"] == stated["memory"]["loaded"]["device_bytes"]
    assert found["summary"]["device_bytes"] == fullest  # type: ignore[index]
    assert 1 < memory["balanced"]["load"] < 1.01 and memory["loaded"]["load"] == time["loaded"]["load"] == 1.2
    assert time["step_seconds"] == time["balanced"]["step_seconds"] < time["loaded"]["step_seconds"]
    assert stated["time"]["step_seconds"] == time["loaded"]["step_seconds"]
    assert stated["time"]["balanced"]["step_seconds"] == time["step_seconds"]
    assert "balanced" not in document(PIPE)["memory"]
    head = training_line(found["training"])
    assert (
        "sequence 8,192" in head
        and "expert load 1.2" in head
        and "expert load" not in training_line(training_settings(make_plan(job_of(PIPE)).job))
    )


def test_the_load_of_experts_is_said_in_one_line() -> None:
    plans = [load_plan(None, {**MIXTURE, **own}) for own in ({}, {"training.moe_load": 1}, {"parallel.ep": 1})]
    said = [dict(main_figures(plan)).get("routing", "") for plan in plans]
    assert said[0].startswith("balanced 72.3 GiB and ") and "; at 1.2 times the mean" in said[0]
    assert said[1:] == ["planned at 1 times the mean on the fullest rank (training.moe_load)", ""]


def test_a_model_of_one_stack_says_nothing_of_stacks() -> None:
    found = document(PIPE)
    assert "stage_stacks" not in found
    assert all("stacks" not in rank for rank in found["ranks"])


def test_messages_over_pp_and_their_time_are_in_the_document() -> None:
    found = document(PIPE)
    over_pp = [[m for m in s if m["axis"] == "pp"] for s in found["communication"]["step_by_stage"]]
    assert [[m["what"] for m in stage] for stage in over_pp] == [
        ["stages", "shared parameters", "gradient norm"],
        ["stages", "gradient norm"],
        ["stages", "shared parameters", "gradient norm"],
    ]
    assert [stage[0]["count"] for stage in over_pp] == [4, 8, 4]
    parts = found["time"]["breakdown"]
    assert tuple(parts) == tuple(part.name for part in PARTS if part.name != "ep")
    assert sum(parts.values()) == pytest.approx(found["time"]["step_seconds"])
    assert parts["pp"] > 0 and parts["bubble"] > 0


def test_the_tables_show_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    plan = make_plan(job_of({**PIPE, **T5}))
    print_plan(plan, plan.require_legal(), PlanView(kinds=(), ranks=True, full=True))
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert "enc 4-5, dec 0-1" in text and "enc 0-3" in text and "dec 2-5" in text
    # 4 micro batches: 3 MiB of encoder forward and back, 3/8 MiB of decoder beside it
    at = lines.index(["Pipeline", "traffic", "of", "one", "step"])
    rows = [row[:4] for row in lines[at + 2 : at + 5]]
    assert rows == [["0", "4", "12.0", "MiB"], ["1", "12", "25.5", "MiB"], ["2", "8", "13.5", "MiB"]]
    (parts,) = (line for line in text.splitlines() if line.startswith("parts "))
    assert "bubble" in parts and "pp " in parts
    alone = make_plan(job_of({"cluster": "dgx-a100", "cluster.nodes": 1}))
    print_plan(alone, alone.require_legal(), PlanView(kinds=(), full=True))
    assert "Pipeline traffic" not in capsys.readouterr().out
