"""`mpctl calibrate`: rows in, presets out, a table of errors; bad rows are refused in words."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mpctl.core.units import seconds_text
from mpctl.measure.calibrate.runs import device_preset, usable_runs
from mpctl.plan.planning.plan import load_plan
from mpctl.spec.load import job_from_raw
from mpctl.spec.presets import presets_root
from mpctl.spec.runtime import RuntimeProfile
from tests.cli.calls import Mpctl
from tests.interop import example_logs as logs
from tests.measure.calibrate.test_run_dirs import write_run

ROWS = json.loads((Path(__file__).parent.parent / "recorded" / "published_runs.json").read_text())


def test_runs_become_presets(mpctl: Mpctl, tmp_path: Path) -> None:
    rows = [row for row in ROWS["rows"] if row["group"] == "vtrain_multi"][:4]
    runs, out = tmp_path / "runs.json", tmp_path / "out"
    runs.write_text(json.dumps({"rows": rows}))
    said = mpctl("calibrate", str(runs), "--out", str(out))
    assert said.code == 0
    assert "vtrain_multi" in said.out
    text = (out / "runtimes" / "megatron-deepspeed.toml").read_text()
    assert text.startswith("# Fitted by `mpctl calibrate` to 4 runs (vtrain_multi)")
    assert RuntimeProfile.model_validate(tomllib.loads(text)).seen.gpus == 512


def test_what_own_runs_told_is_one_document(mpctl: Mpctl, tmp_path: Path) -> None:
    """A row that cannot be planned is in it, with the reason, and the others are fitted."""
    rows = [row for row in ROWS["rows"] if row["group"] == "vtrain_multi"][:2]
    uneven = {**rows[0], "id": "uneven", "job": {**rows[0]["job"], "parallel": {"tp": 7}}}
    (tmp_path / "runs.json").write_text(json.dumps([*rows, uneven]))
    out = str(tmp_path / "out")
    said = mpctl("calibrate", str(tmp_path / "runs.json"), "--out", out, "--json")
    told = json.loads(said.out)
    assert said.code == 0 and told["schema"] == "mpctl.calibrate/1"
    assert {issue["where"].split(":")[0] for issue in told["unusable"]} == {"uneven"}
    assert set(told["errors"]["left_out"]) == {row["id"] for row in rows}
    assert told["band"]["megatron-deepspeed"] > 1 and told["learnt"] and told["telling"]


STEP = {"job": {"cluster": {"preset": "dgx-h100", "nodes": 1}, "model": "llama-3-8b", "parallel": {"tp": 8}}}


def runs_of(folder: Path, *seconds: float) -> str:
    """A list of runs of one job of Megatron-Core, measured at so many seconds."""
    training = {"runtime": "megatron-core", "micro_batch_size": 1, "global_batch_size": 8}
    job = {**STEP["job"], "training": training}
    path = folder / "runs.json"
    rows = [{"id": f"run {n}", "job": job, "measured": {"step_seconds": s}} for n, s in enumerate(seconds)]
    path.write_text(json.dumps(rows))
    return str(path)


def planned_step() -> tuple[float, float, float]:
    """The planned step of these runs, and the bounds of its band."""
    settings = {"training.runtime": "megatron-core", "training.global_batch_size": 8, "cluster.nodes": 1}
    plan = load_plan(None, {"cluster": "dgx-h100", "model": "llama-3-8b", "parallel.tp": 8, **settings})
    assert plan.estimate and not isinstance(plan.estimate.time, str)
    return plan.estimate.time.total, plan.estimate.time.low, plan.estimate.time.high


def test_no_preset_is_fitted_to_a_run_outside_the_band_of_its_plan(mpctl: Mpctl, tmp_path: Path) -> None:
    """A run that took 1.8 times as long as planned is sick, and not a property of the cluster."""
    total, low, high = planned_step()
    out = tmp_path / "out"
    said = mpctl("calibrate", runs_of(tmp_path, 1.8 * total), "--out", str(out))
    measured, planned, band = seconds_text(1.8 * total), seconds_text(total), [seconds_text(s) for s in (low, high)]
    words = f"run 0: this run lies outside the band (measured {measured}, planned {planned}, band {' to '.join(band)})"
    assert said.code == 2 and words in said.err and not out.exists()
    for hint in ("throttled clocks", "`mpctl why LOG`", "--force fits to it anyway"):
        assert hint in said.err
    fast = mpctl("calibrate", runs_of(tmp_path, 0.6 * total), "--out", str(out))
    assert fast.code == 2 and "another job than this layout" in fast.err
    forced = mpctl("calibrate", runs_of(tmp_path, 1.8 * total), "--out", str(out), "--force", "--json")
    (outside,) = json.loads(forced.out)["outside"]
    assert forced.code == 0 and words in forced.err and (out / "clusters" / "dgx-h100.toml").exists()
    assert (outside["run"], outside["measured_seconds"], outside["high_seconds"]) == ("run 0", 1.8 * total, high)


def test_one_run_in_ten_may_lie_outside(mpctl: Mpctl, tmp_path: Path) -> None:
    """By hand: nine of ten runs are expected in a 90 % band, so 1 of 10 stops nothing and 2 do."""
    total, out = planned_step()[0], str(tmp_path / "out")
    said = mpctl("calibrate", runs_of(tmp_path, *[total] * 9, 1.8 * total), "--out", out)
    assert said.code == 0 and "! run 9: this run lies outside the band" in said.err
    assert mpctl("calibrate", runs_of(tmp_path, *[total] * 8, *[1.8 * total] * 2), "--out", out).code == 2


def test_it_says_who_reads_the_presets_from_now_on(
    mpctl: Mpctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    runs = runs_of(tmp_path, 1.05 * planned_step()[0])
    apart = mpctl("calibrate", runs, "--out", "fitted")
    assert "MPCTL_PRESETS=fitted mpctl search JOB --cluster dgx-h100 --runtime megatron-core" in apart.out
    assert "reads" not in apart.out
    here = mpctl("calibrate", runs, "--out", "presets")
    names = "clusters/dgx-h100, devices/h100-sxm, runtimes/megatron-core"
    assert "every later mpctl command in this directory reads" in here.out and names in " ".join(here.out.split())
    assert "MPCTL_PRESETS" not in here.out
    monkeypatch.setenv("MPCTL_PRESETS", str(tmp_path / "fitted"))
    assert json.loads(mpctl("calibrate", runs, "--out", "fitted", "--json").out)["read_by"] == "variable"


def test_the_bundled_presets_are_not_overwritten(mpctl: Mpctl, tmp_path: Path) -> None:
    """In a checkout ./presets is the folder of the bundled ones."""
    said = mpctl("calibrate", runs_of(tmp_path, planned_step()[0]), "--out", str(presets_root()))
    assert said.code == 2 and "the bundled presets lie there" in said.err


def test_bad_runs_are_refused(mpctl: Mpctl, tmp_path: Path) -> None:
    bad = tmp_path / "runs.json"
    for text, words in (("{", "bad-runs"), ("[]", "no rows"), ('[{"job": {}}]', "a run has")):
        bad.write_text(text)
        said = mpctl("calibrate", str(bad), "--out", str(tmp_path / "out"))
        assert said.code == 2
        assert words in said.out + said.err
    assert mpctl("calibrate", str(tmp_path / "none.json"), "--out", str(tmp_path)).code == 2


def test_runs_that_cannot_be_planned_are_named_and_left_out(mpctl: Mpctl, tmp_path: Path) -> None:
    """Uneven layers, heads that do not divide, an unknown setting, no time, milliseconds, above the
    peak, no link, no row."""
    training = {"runtime": "megatron-core", "micro_batch_size": 1, "global_batch_size": 8}

    def row(name: str, seconds: float = 1.0, **tables: dict[str, Any]) -> dict[str, Any]:
        job = {
            "cluster": {"preset": "dgx-h100", "nodes": 1},
            "model": {"preset": "llama-3-8b"},
            "parallel": {"tp": 8},
            "training": training,
        }
        return {"id": name, "job": job | tables, "measured": {"step_seconds": seconds}}

    bad = [
        row("uneven", parallel={"pp": 8, "vpp": 3}),
        row("heads", model={"preset": "llama-3-8b", "heads": 12}),
        row("unknown", parallel={"tpp": 8}),
        row("no-time", seconds=0),
        row("milliseconds", seconds=2000.0),
        row("too-fast", seconds=0.04),
        row("no-link", cluster={"preset": "b200-node", "nodes": 4}),
        5,
    ]
    runs, out = tmp_path / "runs.json", tmp_path / "out"
    runs.write_text(json.dumps([row("good", seconds=1.3), *bad]))
    said = mpctl("calibrate", str(runs), "--out", str(out))
    assert said.code == 0 and (out / "runtimes" / "megatron-core.toml").exists()
    for reason in (
        "uneven: model.layers: 32 layers cannot be split evenly into 8 stages x 3 chunks",
        "heads: model.heads: 12 heads do not divide hidden 4096",
        "unknown: parallel.tpp: there is no such setting",
        "no-time: a run has job.cluster (a preset) and measured.step_seconds",
        "no-link: cluster.inter_node has no bandwidth",
        "milliseconds: a step of 33.3 min, and the plan is",
        "too-fast: a step of 40.0 ms, and at the device's peak FLOP/s it takes",
        "8: a run has job.cluster (a preset)",
    ):
        assert f"! not fitted to: {reason}" in said.err
    runs.write_text(json.dumps(bad))
    said = mpctl("calibrate", str(runs), "--out", str(tmp_path / "none"))
    assert said.code == 2 and "uneven: model.layers" in said.err and "no-link" in said.err
    assert not (tmp_path / "none").exists()


def test_a_measured_run_with_tp_across_nodes_is_a_run() -> None:
    """nanotron's sweep has such layouts, whose jobs do not say that they meant it."""
    job = {
        "cluster": {"preset": "hf-h100", "nodes": 2},
        "model": {"preset": "llama-3-8b"},
        "parallel": {"tp": 16},
        "training": {"runtime": "nanotron"},
    }
    (run,), reasons = usable_runs([{"job": job, "measured": {"step_seconds": 1.0}}])
    assert run.layout.job.parallel.tp == 16 and not reasons


def test_a_cluster_file_on_another_preset_is_fitted(mpctl: Mpctl, tmp_path: Path) -> None:
    """Its device is the base's, or a file beside it; the copies plan by their names."""
    text = 'preset = "selene"\nnodes = 2\ninter_node = { bandwidth = "4 x 100 Gb/s" }\n'
    (tmp_path / "ours.toml").write_text(text)
    (tmp_path / "fast.toml").write_text('preset = "./ours.toml"\ndevice = "./mine.toml"\n')
    device = (presets_root() / "devices" / "a100-80gb.toml").read_text()
    (tmp_path / "mine.toml").write_text(device)
    (tmp_path / "bare.toml").write_text('preset = "./ours.toml"\n[device]\nname = "none"\n')
    (tmp_path / "runs.json").write_text(
        json.dumps(
            [
                {
                    "job": {
                        "model": "llama-3-8b",
                        "cluster": f"./{name}.toml",
                        "parallel": {"tp": 4},
                        "training": {"runtime": "other", "micro_batch_size": 1, "global_batch_size": 16},
                    },
                    "measured": {"step_seconds": 4.0},
                }
                for name in ("ours", "fast", "bare")
            ]
        )
    )
    out = tmp_path / "out"
    said = mpctl("calibrate", str(tmp_path / "runs.json"), "--out", str(out))
    assert said.code == 0, said.err
    assert "bare.toml: it names no device preset that can be fitted" in said.err
    assert f"MPCTL_PRESETS={out} mpctl search JOB --cluster fast --runtime other" in said.out
    assert {path.name for path in (out / "devices").iterdir()} == {"a100-80gb.toml", "mine.toml"}
    mine = str(out / "clusters" / ".." / "devices" / "mine.toml")
    for name, fitted in (("ours", "a100-80gb"), ("fast", mine)):
        copy = str(out / "clusters" / f"{name}.toml")
        assert device_preset(copy) == fitted
        cluster = job_from_raw({"cluster": copy}, {}).cluster
        assert cluster.step_factor and cluster.inter_node.bandwidth == 50e9


def test_run_directories_are_taken_as_they_lie(mpctl: Mpctl, tmp_path: Path) -> None:
    for name, steps in (("tp1-r1", 0.8), ("tp1-r2", 0.9)):
        write_run(tmp_path / "bench" / name, (steps,) * 3)
    said = mpctl("calibrate", str(tmp_path / "bench"), "--out", str(tmp_path / "out"))
    assert said.code == 0
    assert "bench     2" in said.out
    assert (tmp_path / "out" / "clusters" / "this-machine.toml").exists()
    said = mpctl("calibrate", str(tmp_path), "--cluster", "none", "--out", str(tmp_path / "out"))
    assert said.code == 2 and "none" in said.err


def test_a_run_directory_without_a_step_is_named_and_left_out(mpctl: Mpctl, tmp_path: Path) -> None:
    write_run(tmp_path / "bench" / "good", (0.8,) * 3)
    write_run(tmp_path / "bench" / "empty", ())
    (tmp_path / "bench" / "notes.log").write_text("beside runs, a log is none")
    said = mpctl("calibrate", str(tmp_path / "bench"), "--out", str(tmp_path / "out"))
    assert said.code == 0 and "no step of the run was recorded" in said.err
    said = mpctl("calibrate", str(tmp_path / "bench" / "empty"), "--out", str(tmp_path / "no"))
    assert said.code == 2 and "[no-steps]" in said.err


def test_logs_calibrate_and_those_that_cannot_are_named(mpctl: Mpctl, tmp_path: Path) -> None:
    """A list with rows of both kinds; a run of 60 layers on 8 stages; a log of two runs."""
    lines = logs.ARGUMENTS.splitlines()
    changed = {"num_layers": 60, "pipeline_model_parallel_size": 8, "tensor_model_parallel_size": 1}
    uneven = [f"  {name} ..... {changed[name]}" if (name := line.split()[0]) in changed else line for line in lines]
    slower = logs.deepspeed([3 * t for t in logs.TIMES])
    for name, text in (
        ("good", logs.megatron(arguments=logs.ARGUMENTS)),
        ("uneven", logs.megatron(arguments="\n".join(uneven))),
        ("mixed", f"{logs.deepspeed()}\n{slower}"),
    ):
        (tmp_path / f"{name}.log").write_text(text)
    job = {
        "model": {"preset": "llama-3-8b"},
        "training": {"global_batch_size": logs.BATCH},
        "cluster": {"preset": "dgx-h100", "nodes": 2},
        "parallel": {"zero": 1},
    }
    rows = [
        {"log": "good.log"},
        {"log": "uneven.log"},
        {"log": "mixed.log", "job": job},
        {"log": "good.log", "job": {**job, "parallel": {"tp": 4}}, "group": "mine"},
        {"log": "none.log"},
        {"job": job, "measured": {"step_seconds": 2.0}},
        {"log": 5},
    ]
    runs, out = tmp_path / "runs.json", tmp_path / "out"
    runs = runs.with_suffix("")  # a list, whatever its name
    runs.write_text(json.dumps(rows))
    said = mpctl("calibrate", str(runs), "--cluster", "dgx-h100", "--out", str(out))
    assert said.code == 0 and (out / "runtimes" / "megatron-core.toml").exists()
    assert "mine" in said.out and "good.log: megatron: 5 steady lines, left out" in said.err
    assert "60 layers cannot be split evenly into 8 stages" in said.err
    assert "mixed.log: steps of line 1 on" in said.err and "none.log: " in said.err
    assert "5: a row with a log has `log`, a path" in said.err
    said = mpctl("calibrate", str(tmp_path / "mixed.log"), "--out", str(out / "no"))
    assert said.code == 2 and "[log-mixed]" in said.err and not (out / "no").exists()
    runs.write_text('[{"log": 5}]')
    said = mpctl("calibrate", str(runs), "--out", str(out))
    assert said.code == 2 and "a row with a log has `log`" in said.err
    said = mpctl("calibrate", str(runs), "--out", str(out), "--job", "demo", "--from", "megatron", "")
    assert said.code == 2 and "leave one of them out" in said.err
