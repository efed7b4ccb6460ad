"""Run directories as rows of runs: finding, reading and refusing them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpctl.measure.calibrate.runs import find_runs, is_run_path, read_runs, run_rows
from mpctl.spec.load import load_job
from mpctl.spec.presets import presets_root

STEPS = (9.0, 8.0, 2.0, 2.2, 2.1)
JOB = {"training.global_batch_size": 16, "cluster.gpus_per_node": 4, "parallel.tp": 2}


def write_run(folder: Path, steps: tuple[float, ...] = STEPS, **settings: Any) -> Path:
    """A run directory as a launch of `demo` leaves it, with steps of so many seconds."""
    folder.mkdir(parents=True)
    job = load_job("demo", {**JOB, **settings})
    (folder / "job.json").write_text(job.model_dump_json())
    records = [
        {"step": n, "loss": 1.0, "tokens": n, "step_seconds": s, "tokens_per_second": 1.0}
        for n, s in enumerate(steps, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def issues_of(*paths: Path, cluster: str | None = None) -> dict[str, str]:
    """Rules and messages of the issues of these paths."""
    rows, issues = run_rows(paths, cluster)
    assert not rows
    return {issue.rule: str(issue) for issue in issues}


def test_a_run_is_its_job_on_a_preset_and_the_median_step_after_the_warm_up(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "bench" / "tp2-r1")
    (row,), _ = run_rows([folder])
    assert row["measured"] == {"step_seconds": 2.1}
    assert (row["id"], row["group"]) == (str(folder), "bench")
    assert row["job"]["cluster"] == {"preset": "this-machine", "nodes": 1, "gpus_per_node": 4, "headroom": 5.0}
    (run,) = read_runs([row])
    assert run.parts == {"devices": "cpu", "clusters": "this-machine", "runtimes": "mpctl"}
    assert (run.job.parallel.tp, run.job.world_size) == (2, 4)


def test_a_run_is_found_by_its_files_and_by_any_folder_above_it_and_counts_once(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / "bench" / f"dp{n}-r1") for n in (1, 2))
    assert list(find_runs(tmp_path)) == [first, second]
    assert list(find_runs(first / "summary.json")) == [first]
    assert is_run_path(first / "summary.json") and not is_run_path(tmp_path / "runs.json")
    rows, _ = run_rows([first, tmp_path / "bench"])
    assert [row["id"] for row in rows] == [str(first), str(second)]


def test_ranks_that_trained_nothing_are_no_run(tmp_path: Path) -> None:
    trained, probed = (write_run(tmp_path / name) for name in ("dp2-r1", "kernels-r1"))
    (probed / "bench.json").write_text("{}")
    assert list(find_runs(tmp_path)) == [trained]
    assert issues_of(probed).keys() == {"bad-runs"}


def test_where_only_the_summary_was_kept_its_step_counts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=())
    (folder / "summary.json").write_text('{"step_seconds": 0.5}')
    assert run_rows([folder])[0][0]["measured"] == {"step_seconds": 0.5}


def test_all_issues_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    unmeasured = write_run(tmp_path / "unmeasured", steps=())
    unknown = write_run(tmp_path / "unknown", **{"cluster.name": "nobody's"})
    told = issues_of(tmp_path / "empty", unmeasured, unknown)
    assert told.keys() == {"bad-runs", "no-steps", "unknown-cluster"}
    assert "nobody's" in told["unknown-cluster"] and "--cluster" in told["unknown-cluster"]


def test_a_run_on_cpu_cores_says_nothing_of_gpus(tmp_path: Path) -> None:
    rows, (issue,) = run_rows([write_run(tmp_path / "run")], "dgx-a100")
    assert not rows and issue.rule == "other-device"
    assert issue.message == "it ran on cpu, and the devices of dgx-a100 are cuda"


def test_the_cluster_may_be_named_by_a_file(tmp_path: Path) -> None:
    ours = tmp_path / "ours.toml"
    ours.write_bytes((presets_root() / "clusters" / "this-machine.toml").read_bytes())
    folder = write_run(tmp_path / "run", **{"cluster.name": "nobody's"})
    (row,), _ = run_rows([folder], str(ours))
    assert row["job"]["cluster"]["preset"] == str(ours)
    assert read_runs([row])[0].parts["clusters"] == str(ours)
