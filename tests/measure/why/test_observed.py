"""Runs of mpctl as they are observed, and the table of published runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpctl.measure.why.changes import find_changes
from mpctl.measure.why.document import why_document
from mpctl.measure.why.observed import observe_run
from mpctl.measure.why.standing import find_standing, published_runs
from mpctl.plan.planning.plan import load_plan
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.slow import SlowPart, append_slow
from tests.measure.calibrate.test_run_dirs import write_run
from tests.measure.why.planted import DENSE, plan_of
from tests.measure.why.published import TABLE, lines


def test_a_rank_that_the_launcher_named_is_the_first_suspect(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", (2.0,) * 30)
    text = "rank 3 computes 1.8 times as long as its equals since step 12, 28 ms of a step"
    append_slow(RunDir(run).slow, [SlowPart("ranks", "rank 3", (3,), (), "", 1.8, 12, 28, text)])
    document = why_document(observe_run(run))
    first = document["suspects"][0]
    assert (first["cause"], first["signature"], first["evidence"]) == ("straggler", "slow-rank", text)


def test_a_run_times_its_messages_itself(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", (2.0,) * 30)
    records = RunDir(run).metrics
    records.write_text(
        records.read_text().replace('"loss"', '"communication_seconds": {"tp": 0.5, "dp_cp": 0.25}, "loss"')
    )
    parts = {part["name"]: part["measured"] for part in why_document(observe_run(run))["parts"]}
    assert (parts["tp"], parts["dp_cp"], parts["compute"]) == (0.5, 0.25, 1.25)


@pytest.mark.slow
def test_the_table_of_published_runs_is_that_of_the_recorded_ones() -> None:
    assert TABLE.read_text("utf-8").splitlines() == list(lines())


def test_a_standing_is_among_runs_of_its_kind() -> None:
    plan = plan_of(DENSE)
    standing = find_standing(plan, plan.time.total)
    assert standing is not None and standing["among"] >= 5
    slower = find_standing(plan, 3 * plan.time.total)
    assert slower is not None and slower["percentile"] == 0
    assert slower["mfu"] == pytest.approx(standing["mfu"] / 3)
    device = plan.job.cluster.device
    assert device is not None
    alike = [run for run in published_runs() if run.device == device.name and run.dtype == "bf16"]
    assert standing["best_mfu"] <= max(run.mfu for run in alike)


def test_changes_save_what_their_plans_save_and_fit() -> None:
    job = {**DENSE, "parallel.tp": 16, "parallel.pp": 1, "parallel.allow_tp_across_nodes": True}
    plan = plan_of(job)
    changes = find_changes(plan, "megatron")
    assert changes
    for change in changes:
        other = load_plan(None, {**job, **change["settings"]}).estimate
        assert other is not None and other.fits and other.step_seconds is not None
        assert change["seconds"] == pytest.approx(plan.time.total - other.step_seconds)
        assert change["seconds"] >= 0.02 * plan.time.total
    assert any("without --tensor-model-parallel-size 16" in change["flags"] for change in changes)
