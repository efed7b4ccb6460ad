"""The same layout under other software: the runtimes that are tried, and the result of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.interop.registry import TARGETS
from mpctl.plan.planning.plan import load_plan, make_plan
from mpctl.plan.planning.runtimes import (
    elsewhere_text,
    is_open,
    named_runtimes,
    open_text,
    other_runtimes,
    runtime_of,
    same_layout,
)
from mpctl.plan.planning.summary import plan_summary
from mpctl.spec.load import load_job
from mpctl.spec.presets import VARIABLE, preset_names
from mpctl.spec.runtime import get_profile

H100: dict[str, Any] = {
    "cluster": "dgx-h100",
    "cluster.nodes": 1,
    "model": "gpt2-medium",
    "parallel.tp": 2,
    "parallel.pp": 2,
    "parallel.vpp": 2,
    "training.global_batch_size": 32,
}


def test_every_launcher_that_a_preset_names_is_one_of_emit() -> None:
    named = {name: get_profile(name).runs.emit for name in preset_names("runtimes")}
    assert {launcher for emit in named.values() for launcher in emit} <= {*TARGETS}
    for launcher in TARGETS:
        for kind in ("cuda", "rocm"):
            runs = {n: get_profile(n).runs for n, emit in named.items() if launcher in emit}
            theirs = [n for n, found in runs.items() if found.runs_on(kind) and not found.needs]
            assert len(theirs) <= 1, (launcher, kind)
            assert runtime_of(launcher, kind) == next(iter(theirs), None)
    assert runtime_of("megatron", "cuda") == "megatron-core"
    assert runtime_of("megatron-bridge", "cuda", {"bf16": 1e15}) == "megatron-core"
    assert runtime_of("megatron-bridge", "cuda", {"bf16": 1e15, "nvfp4": 1e16}) == "megatron-core-graphs"
    assert runtime_of("megatron", "rocm") == "amd-megatron"
    assert runtime_of("megatron", "cpu") is None


def test_a_runtime_is_open_on_gpus_where_nobody_named_one() -> None:
    job = load_job(None, H100)
    assert is_open(job)
    assert open_text(job).endswith("no --runtime was given; never measured on NVIDIA H100-SXM5-80GB")
    assert not is_open(load_job(None, {**H100, "training.runtime": "mpctl"}))
    assert not is_open(load_job("demo"))
    assert not is_open(load_job(None, {**H100, "launch.device": "cpu"}))
    assert not is_open(load_job("gpt3-175b-1024"))  # its file names one


def test_others_are_those_of_today_that_run_on_such_devices() -> None:
    nvidia = other_runtimes(load_job(None, H100))
    assert nvidia[0] == "megatron-core"  # measured on an H100
    assert {"torchtitan", "nanotron", "fsdp2"} <= {*nvidia}
    assert not {"mpctl", "amd-megatron", "megatron-2021"} & {*nvidia}
    assert "megatron-core-graphs" not in nvidia
    assert "megatron-core-graphs" in other_runtimes(load_job(None, {**H100, "cluster": "dgx-gb200"}))
    amd = other_runtimes(load_job(None, {**H100, "cluster": "mi300x-node"}))
    assert "amd-megatron" in amd and "megatron-core" not in amd


def test_each_answer_is_the_plan_of_that_runtime() -> None:
    plan = load_plan(None, H100)
    names = named_runtimes("all", plan.job)
    assert names[0] == "megatron-core" and "mpctl" in names
    for under in same_layout(plan, names):
        alone = load_plan(None, {**H100, "training.runtime": under.runtime})
        entry = under.as_dict()
        missing = [c for c in alone.checks if c.rule == "runtime-runs" and c.status != "ok"]
        if under.plan is None:
            assert missing and all(text in missing[0].message for text in under.missing)
            assert entry["step_seconds"] is None
        else:
            assert not missing
            assert entry["step_seconds"] == plan_summary(alone).step_seconds
            assert entry["device_bytes"] == plan_summary(alone).device_bytes


def test_in_words_the_fastest_is_first_and_what_does_not_run_last() -> None:
    plan = load_plan(None, H100)
    others = same_layout(plan, other_runtimes(plan.job))
    text = elsewhere_text(others)
    timed = sorted((u.seconds, u.runtime) for u in others if u.seconds is not None)
    assert text.startswith(f"{timed[0][1]} ") and "; not run by nanotron" in text
    assert "not run" not in elsewhere_text([u for u in others if u.plan])


def test_a_rule_of_another_runtime_is_a_reason() -> None:
    """nanotron refuses fewer micro batches than stages before the last."""
    job = load_job(
        None,
        {
            **H100,
            "parallel.vpp": 1,
            "parallel.pp": 4,
            "parallel.tp": 1,
            "parallel.dp": 2,
            "training.global_batch_size": 4,
        },
    )
    (under,) = same_layout(make_plan(job), ["nanotron"])
    assert under.plan is None and "2 micro batches on 4 stages" in under.missing[0]


def test_names_that_are_none_are_refused_with_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        named_runtimes("megatron-core,torchtitn", load_job(None, H100))
    (issue,) = caught.value.issues
    assert issue.where == "--runtimes" and "torchtitan" in issue.hint


def test_an_invalid_file_of_the_user_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runtimes").mkdir()
    (tmp_path / "runtimes" / "broken.toml").write_text("name = 3")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert "megatron-core" in other_runtimes(load_job(None, H100))
    assert runtime_of("torchtitan", "cuda") == "torchtitan"
