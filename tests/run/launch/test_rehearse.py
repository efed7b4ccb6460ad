"""`mpctl launch --rehearse` as people type it: no data, no cluster, plan and step."""

from __future__ import annotations

import json
import re
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpctl.core.errors import RunFailed
from mpctl.plan.planning.plan import Plan, make_plan
from mpctl.render.rehearsal import print_rehearsal
from mpctl.run.hosts.machine import Machine
from mpctl.run.launch.rehearse import check_rehearsal, chosen_ranks, exit_code, rehearse
from mpctl.spec.load import load_job
from tests.cli.calls import Mpctl, caller
from tests.test_architecture import loaded
from tests.train.runtime.test_pipeline import layout
from tests.train.runtime.tiny import settings

HERE = Machine(cores=2, gpus=0, memory_bytes=1 << 33)


@pytest.fixture
def mpctl(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch) -> Mpctl:
    monkeypatch.chdir(tmp_path)
    return caller(capsys)


def typed(**given: Any) -> list[str]:
    sets = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    return ["launch", "--rehearse", *(part for one in sets for part in ("--set", one))]


def tiny(tp: int = 1, dp: int = 1, **changes: Any) -> list[str]:
    return typed(**settings(tp, dp, **changes))


def tiny_plan(**changes: Any) -> Plan:
    return make_plan(load_job(None, settings(**changes)))


def printed(document: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    print_rehearsal(document)
    return capsys.readouterr().out


@pytest.mark.slow
def test_json_holds_plan_and_rehearsal(mpctl: Mpctl, tmp_path: Path) -> None:
    said = mpctl(*tiny(2, 2, launch__device="cuda"), "--json")
    assert said.code == 0, said.err
    document = said.document
    assert document["schema"] == "mpctl.rehearsal/2"
    assert (document["agrees"], document["fits"], document["kind"]) == (True, True, "cuda")
    (rank,) = document["ranks"]
    assert rank["rank"] == 0 and rank["failure"] is None and rank["over_bytes"] == 0
    assert rank["step_traffic"]["planned"] == rank["step_traffic"]["measured"] != {}
    peak = rank["peak_bytes"]
    assert 0 < peak["planned"] == pytest.approx(peak["measured"], rel=0.01)
    assert rank["peak_bytes"]["measured"] == sum(rank["at_peak"].values())
    assert "1/1  rank 0, stage 0: 2 of 2 micro batches" in said.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_audit_names_what_loses_most(mpctl: Mpctl, capsys: pytest.CaptureFixture[str]) -> None:
    said = mpctl(*tiny(launch__device="cuda", cluster__device="h200"), "--audit", "--json")
    assert said.code == 0, said.err
    audit = said.document["ranks"][0]["audit"]
    saved = [(r["seconds"] - r["least_seconds"]) * r["times"] for r in audit["rows"]]
    assert saved == sorted(saved, reverse=True) and saved[0] > 0
    text = printed(said.document, capsys)
    assert "what loses most" in text and "layers.*" in text and "H200" in text


def test_an_audit_is_of_a_gpu_and_of_a_rehearsal(mpctl: Mpctl) -> None:
    said = mpctl(*tiny(), "--audit")
    assert said.code == 2 and "--device cuda" in said.err
    said = mpctl("launch", "demo-gpt", "--audit")
    assert said.code == 2 and "add --rehearse" in said.err


@pytest.mark.slow
def test_a_rank_of_every_stage_unless_one_is_chosen(mpctl: Mpctl) -> None:
    job = tiny(**layout(2, tp=2, dp=3), training__global_batch_size=24)
    said = mpctl(*job)
    assert said.code == 0, said.err
    lines = [line for line in said.out.splitlines() if line]
    assert [line.split()[:2] for line in lines[:4]] == [["cpu,", "fp32"], ["rank", "stage"], ["0", "0"], ["6", "1"]]
    assert re.search(r"; steps peak \S+ to \S+ off the plan, rank [06] at ", " ".join(lines))
    assert "✓ fits: 2 of 12 ranks rehearsed; the fullest, rank 0, peaks at" in said.out
    assert "≠" not in said.out and said.out.count("=") == 10
    assert "only some of a step's micro batches were run" in said.out  # 3 of 4 on stage 1
    said = mpctl(*job, "--rank", 11, "--json")
    assert said.document["ranks"][0]["coords"] == {"tp": 1, "cp": 0, "dp": 2, "pp": 1}


@pytest.mark.slow
def test_a_device_that_is_too_small_is_known_before(mpctl: Mpctl) -> None:
    small = tiny(**{"cluster__device.memory_bytes": 1 << 20})
    said = mpctl(*small)
    assert said.code == 3
    assert "does not fit: 1 of 1 rank rehearsed; rank 0 peaks at " in said.out
    assert "too much (headroom 5 %)" in said.out


@pytest.mark.slow
def test_a_rank_is_judged_as_its_plan_is(mpctl: Mpctl, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors of a few MiB fit 256 MiB; with the libraries' context they do not."""
    small = tiny(launch__device="cuda", **{"cluster__device.memory_bytes": 1 << 28})
    said = mpctl(*small, "--json")
    assert said.code == mpctl("plan", *small[2:]).code == 3
    document = said.document
    assert (document["fits"], document["agrees"]) == (False, True)
    (rank,) = document["ranks"]
    assert rank["peak_bytes"]["measured"] < 1 << 25 < 1 << 28 < rank["device_bytes"]
    assert rank["over_bytes"] == rank["device_bytes"] - int(0.95 * (1 << 28))
    assert rank["host_syncs"] == []
    rank["host_syncs"].append("families/toy.py:7: reads a number from the device")
    text = printed(document, capsys)
    assert "! rank 0: in every step the host waits for its device at families/toy.py:7" in text
    assert " of 256.0 MiB of " in text and " too much (headroom 5 %)" in text
    rank |= {"over_bytes": 0, "device_bytes": 1 << 27}
    assert ", 128.0 MiB free (headroom 5 %)" in printed({**document, "fits": True}, capsys)


@pytest.mark.slow
def test_the_last_line_has_the_error_of_the_peaks(mpctl: Mpctl, capsys: pytest.CaptureFixture[str]) -> None:
    """Megabytes of a zero-bubble job whose plan forgot gradients: 34 planned, 47.2 measured."""
    document = mpctl(*tiny(), "--json").document
    (rank,) = document["ranks"]
    mib = 1 << 20
    off = rank | {"peak_bytes": {"planned": 34 * mib, "measured": int(47.2 * mib)}}
    last = " ".join(printed({**document, "ranks": [off]}, capsys).split())
    assert last.endswith("; a step peaks at 47.2 MiB, +38.8% off the planned 34.0 MiB")
    below = rank | {"rank": 1, "peak_bytes": {"planned": 50 * mib, "measured": 49 * mib}}
    last = " ".join(printed({**document, "ranks": [off, below]}, capsys).split())
    assert last.endswith("; steps peak -2.0% to +38.8% off the plan, rank 0 at 47.2 MiB, planned 34.0 MiB")


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (tiny(model__heads=3), "heads-divide-hidden"),
        (tiny(training__dtype="nvfp4"), "not-run-yet"),
        ([*tiny(), "--rank", "1"], "rank-in-world"),
        ([*tiny(), "--dry-run"], "usage"),
        ([*tiny(), "--run-dir", "x", "--resume"], "usage"),
        (["launch", "--rank", "0"], "usage"),
        (tiny(data__path="nowhere"), "data-not-prepared"),
    ],
)
def test_what_a_launch_refuses_is_refused(mpctl: Mpctl, arguments: list[str], rule: str, tmp_path: Path) -> None:
    said = mpctl(*arguments, "--json")
    assert said.code == 2
    assert rule in said.issues
    assert list(tmp_path.iterdir()) == []


def test_other_machines_are_no_reason_to_refuse() -> None:
    plan = tiny_plan(dp=4096, training__global_batch_size=8192, launch__device="cuda")
    assert check_rehearsal(plan, HERE) == []
    assert chosen_ranks(plan.require_legal(), 4095) == [4095]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["parameters", "parameter_bytes", "optimizer_bytes", "messages"])
def test_what_is_not_as_planned_is_named(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tiny_plan(dp=2)
    estimate = plan.estimate
    assert estimate is not None
    changed = replace(estimate)
    if part == "messages":
        vars(changed)["messages"] = (estimate.messages[0][1:],)  # as if it had computed them
    else:
        memory = estimate.expected_memory[0]
        vars(changed)["expected_memory"] = (replace(memory, **{part: getattr(memory, part) + 1}),)
    found: list[dict[str, Any]] = []
    document = rehearse(replace(plan, estimate=changed), HERE, [0], command="", on_rank=found.append)
    assert found == document["ranks"]
    assert not document["agrees"] and exit_code(document) == 1
    lines = [line for line in printed(document, capsys).splitlines() if line.startswith("✗ rank")]
    assert len(lines) == 1 and lines[0].startswith("✗ rank 0 (stage 0), ")


@pytest.mark.slow
def test_a_rank_that_fails_fails_the_rehearsal(capsys: pytest.CaptureFixture[str]) -> None:
    document = rehearse(tiny_plan(), HERE, [0], command="", on_rank=lambda _: None)
    (rank,) = document["ranks"]
    failed = {
        "rank": 0,
        "coords": rank["coords"],
        "agrees": False,
        "over_bytes": None,
        "failure": {"doing": "step 1", "error": "ValueError: 3 of 4"},
    }
    text = printed({**document, "agrees": False, "ranks": [failed, rank]}, capsys)
    assert "✗ rank 0 (stage 0) failed at step 1: ValueError: 3 of 4\n" in text
    assert text.splitlines()[-1] == "✗ 2 of 1 rank rehearsed, 1 failed"


@pytest.mark.parametrize(("says", "printed"), [("Killed", "Killed"), ("", "it printed no error")])
def test_a_process_that_ends_early_reports_why(tmp_path: Path, monkeypatch, says: str, printed: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RunFailed, match=f"rank 7 ended with exit code 3: {printed}"):
        rehearse(tiny_plan(), HERE, [7], command="", on_rank=lambda _: None)


@pytest.mark.slow
def test_the_planning_half_stays_without_torch() -> None:
    code, names = loaded(*tiny(), "--json")
    assert code == 0
    assert not {"torch", "numpy"} & set(names)


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_gpt3_175b_on_1024_ranks(mpctl: Mpctl) -> None:
    """Under a minute of one core and 2 GB, 16 stages of 192 micro batches, of which few are run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    said = mpctl("launch", "gpt3-175b-1024", "--rehearse", "--dtype", "bf16", "--json")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert said.code == 0, said.err
    ranks = said.document["ranks"]
    assert [rank["rank"] for rank in ranks] == list(range(0, 1024, 64))
    assert all(rank["agrees"] for rank in ranks)
    assert [rank["micro_batches_run"] for rank in ranks] == list(range(18, 2, -1))  # in flight, and two
    assert ranks[0]["step_traffic"]["measured"]["pp send"]["count"] == 192
    for rank in ranks:
        peak = rank["peak_bytes"]
        assert peak["planned"] == pytest.approx(peak["measured"], rel=0.05)
        assert rank["building_bytes"] < peak["measured"]
    assert used.ru_utime - before < 60
    assert used.ru_maxrss * 1024 < 2 << 30
