"""`mpctl bench trace`: a file for Perfetto, where the time goes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpctl.measure.bench.trace import part_seconds
from mpctl.records.rundir.marker import write_marker
from mpctl.spec.load import load_job
from tests.cli.calls import Mpctl, assert_refused
from tests.measure.bench.profiles import line, two_stages, write
from tests.train.runtime.tiny import make_data, settings


def made_run(folder: Path, *, job: str | None = None) -> Path:
    """A run of two stages on one CPU host, without a profile."""
    folder.mkdir()
    write_marker(folder)
    tiny = load_job(None, settings(1, 1, parallel__pp=2, cluster__gpus_per_node=2))
    (folder / "job.json").write_text(job or tiny.model_dump_json())
    return folder


def test_the_trace_lies_in_the_run_and_the_table_says_where_time_goes(mpctl: Mpctl, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    write(run, *two_stages(3), *two_stages(4, 130.0))
    said = mpctl("bench", "trace", run)
    assert said.code == 0
    assert "tiny: steps 3-4 of 2 ranks" in said.out and "after the schedule" in said.out
    trace = json.loads((run / "profile" / "trace.json").read_text())
    assert trace["otherData"]["steps"] == [3, 4]
    document = mpctl("bench", "trace", run, "--json", "--out", tmp_path / "t.json").document
    assert (document["schema"], document["bench"]) == ("mpctl.bench/2", "trace")
    assert document["is_complete"] and document["findings"]["file"] == str(tmp_path / "t.json")
    (step,) = [row for row in document["results"] if row["name"] == "stage 1 step"]
    assert (step["seconds"], step["rounds"]) == (8, 2)
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == trace["traceEvents"]


def test_what_is_missing_is_told(mpctl: Mpctl, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    write(run, two_stages(3)[0], line(5, 3, world_size=6, clock="other"))
    with (run / "profile" / "rank-0.jsonl").open("a") as stream:
        stream.write("torn")
    said = " ".join(mpctl("bench", "trace", run).out.split())
    assert "ranks 1-4 recorded not every step, or none" in said
    assert "1 line of the profile could not be read" in said
    assert "clocks of 2 hosts are aligned" in said


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_what_cannot_be_shown_is_exit_2(mpctl: Mpctl, tmp_path: Path, flags: tuple[str, ...]) -> None:
    profiled = made_run(tmp_path / "profiled")
    write(profiled, *two_stages())
    damaged = made_run(tmp_path / "damaged", job="{")
    write(damaged, *two_stages())
    no_profile = made_run(tmp_path / "without")
    for run in (tmp_path / "none", tmp_path, no_profile, damaged):
        assert_refused(mpctl("bench", "trace", run, *flags), wants_json=bool(flags))
    said = mpctl("bench", "trace", profiled, "--out", tmp_path / "no" / "t.json", *flags)
    assert_refused(said, wants_json=bool(flags))


@pytest.mark.slow
def test_a_real_run_beside_its_plan(mpctl: Mpctl, tmp_path: Path) -> None:
    """Every pass of the plan's schedule is in the trace of the run, under the same name."""
    data, run = make_data(tmp_path), tmp_path / "run"
    job = settings(
        2,
        1,
        parallel__pp=2,
        cluster__gpus_per_node=4,
        training__steps=4,
        data__path=str(data),
        training__eval_samples=0,
        checkpoint__at_end=False,
        checkpoint__interval=0,
    )
    more = [word for key, value in job.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    launched = mpctl("launch", *more, "--profile", "3-4", "--run-dir", run)
    assert launched.code == 0, launched.err
    assert mpctl("bench", "trace", run).code == 0
    trace = json.loads((run / "profile" / "trace.json").read_text())
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    names = [f"{letter}{n}" for letter in ("F", "B") for n in range(4)]
    for rank in range(4):
        own = [e for e in events if e["pid"] == rank and e["tid"] == 0]
        for step in (3, 4):
            passes = [e["name"] for e in own if e["args"]["step"] == step and e["name"] in names]
            assert sorted(passes) == sorted(names)
    lines = [json.loads(text) for text in (run / "profile" / "rank-0.jsonl").open()]
    for one in lines:
        parts = part_seconds(one["events"])
        assert parts["forward"] + parts["backward"] + parts["after the schedule"] <= parts["step"]


def test_its_report_is_drawn_and_compared_like_any_other(mpctl: Mpctl, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    write(run, *two_stages(3), *two_stages(4, 130.0))
    report = tmp_path / "a.json"
    report.write_text(mpctl("bench", "trace", run, "--json").out)
    assert mpctl("bench", "compare", report, report).code == 0
    assert mpctl("bench", "report", report, "--out", tmp_path / "drawn").code == 0
    page = (tmp_path / "drawn" / "report.html").read_text()
    assert "stage 1 in world" in page and "profiled steps" in page
