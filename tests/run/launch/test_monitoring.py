"""What a site watches of a run: Prometheus metrics, the hook, and goodput."""

from __future__ import annotations

import json
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mpctl.cli.app import run as mpctl
from mpctl.records.rundir.breadcrumb import BreadcrumbState
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.goodput import recorded_goodput
from mpctl.records.rundir.slow import SlowPart
from mpctl.records.rundir.summary import Failure
from mpctl.run.launch import monitoring
from mpctl.run.launch.attempt import AttemptPhase, AttemptState, NodeState, RankState, RunChange
from mpctl.run.launch.monitoring import METRICS, call_hook, monitored, monitoring_issues
from mpctl.run.launch.status_file import StatusFile
from mpctl.spec.load import load_job
from tests.run.launch.command import launch

FAILURE = Failure(1, "killed by signal 9 (SIGKILL)", doing="step 3", log="log")


def job(**settings: Any) -> Any:
    launch = {f"launch.{key}": value for key, value in settings.items()}
    return load_job(None, {"name": "a", "training.steps": 9, **launch})


def record(step: int, time: float, **more: Any) -> Any:
    return {
        "step": step,
        "loss": 5.0 / step,
        "tokens": 64 * step,
        "step_seconds": 1.0,
        "tokens_per_second": 64.0,
        "time": time,
        **more,
    }


def read(text: str) -> dict[str, float]:
    """Each metric's value; all must have the label of the run."""
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert {sample.labels["run"] for sample in samples} == {"a"}
    return {sample.name: sample.value for sample in samples}


def test_a_file_has_what_happened_and_stays(tmp_path: Path) -> None:
    target, run = tmp_path / "a.prom", RunDir(tmp_path / "run")
    (run.checkpoints / "step-2").mkdir(parents=True)
    seen: list[int] = []
    with monitored(run, job(metrics=str(target)), print, lambda r: seen.append(r["step"])) as (on_record, on_change):
        assert read(target.read_text())["mpctl_up"] == 1
        on_record(record(1, 11.0, mfu=0.4, grad_norm=None))
        on_record(record(2, 12.0, skipped=True))
        on_change(RunChange("failure", 1, "failed", FAILURE))
        assert read(target.read_text())["mpctl_up"] == 0
        on_change(RunChange("restart", 1, "failed", FAILURE))
        on_record(record(2, 20.0))
    values = read(target.read_text())
    assert seen == [1, 2, 2]
    assert (
        values.items()
        >= {
            "mpctl_up": 0,
            "mpctl_step": 2,
            "mpctl_steps": 9,
            "mpctl_loss": 2.5,
            "mpctl_mfu_ratio": 0.4,
            "mpctl_failures_total": 1,
            "mpctl_restarts_total": 1,
            "mpctl_skipped_steps_total": 1,
            "mpctl_goodput_ratio": 0.2,
        }.items()
    )
    assert "mpctl_gradient_norm" not in values and values.keys() <= METRICS.keys()


SLOW = SlowPart("ranks", "rank 3", (3,), (), "", 1.8, 120, 136, "rank 3 computes 1.8 times ...")


def test_what_is_slow_is_a_metric_until_it_is_over(tmp_path: Path) -> None:
    target, run = tmp_path / "a.prom", RunDir(tmp_path / "run")
    run.path.mkdir()
    with monitored(run, job(metrics=str(target)), print, lambda r: None) as (_, on_change):
        assert read(target.read_text())["mpctl_slowest_ratio"] == 1
        on_change(RunChange("slow", 1, "running", words=SLOW.text, slow=[SLOW]))
        values = read(target.read_text())
        assert values["mpctl_up"] == values["mpctl_slow_ranks"] == 1
        assert values["mpctl_slow_links"] == 0 and values["mpctl_slowest_ratio"] == 1.8
        on_change(RunChange("slow", 1, "running", words="rank 3 is no longer slow at step 150"))
        assert read(target.read_text())["mpctl_slow_ranks"] == 0


def test_ranks_that_are_no_longer_heard_are_a_metric(tmp_path: Path) -> None:
    target, run = tmp_path / "a.prom", RunDir(tmp_path / "run")
    run.nodes.mkdir(parents=True)
    now = time.time()
    beats = {0: now, 1: now - 60.0, 2: 0.0}  # the last has not begun
    ranks = {rank: RankState(breadcrumb=BreadcrumbState(beat_time=at)) for rank, at in beats.items()}
    StatusFile(run.status).write(AttemptState([NodeState(ranks=ranks)]), AttemptPhase.RUNNING)
    with monitored(run, job(metrics=str(target)), print, lambda r: None) as (on_record, _):
        on_record(record(1, 11.0))
    values = read(target.read_text())
    assert values["mpctl_silent_ranks"] == 1
    assert values["mpctl_step_timestamp_seconds"] == 11.0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def test_an_endpoint_answers_while_the_run_goes_on(tmp_path: Path) -> None:
    port = free_port()
    run, events = RunDir(tmp_path / "run"), list[str]()
    address = f"127.0.0.1:{port}"
    with monitored(run, job(metrics=address), events.append, lambda r: None) as (on_record, _):
        on_record(record(4, 11.0))
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            assert read(answer.read().decode())["mpctl_step"] == 4
        # A second run on the port goes on without metrics, and says so.
        with monitored(run, job(metrics=address), events.append, lambda r: None) as (other, _):
            other(record(1, 11.0))
    assert len(events) == 1 and "cannot be opened" in events[0]
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=1)


@pytest.mark.parametrize(
    ("settings", "where", "way_out"),
    [
        ({"metrics": "9400"}, "launch.metrics", ":9400"),
        ({"metrics": ":94000"}, "launch.metrics", "65535"),
        ({"metrics": "/no/such/folder/a.prom"}, "launch.metrics", "folder"),
        ({"hook": ["/no/such/program"]}, "launch.hook", "list"),
    ],
)
def test_what_cannot_work_is_refused_before_the_start(settings: dict[str, Any], where: str, way_out: str) -> None:
    (issue,) = monitoring_issues(job(**settings))
    assert issue.where == where and way_out in issue.hint
    assert list(monitoring_issues(job(metrics="[::1]:9400", hook=[sys.executable]))) == []


HOOK = "import json, sys; d = json.load(sys.stdin); open(sys.argv[1], 'a').write(json.dumps(d)+'\\n')"


def test_the_hook_gets_each_change_in_order(tmp_path: Path) -> None:
    log, events = tmp_path / "log", list[str]()
    asked = job(hook=[sys.executable, "-c", HOOK, str(log)])
    with monitored(RunDir(tmp_path / "run"), asked, events.append, lambda r: None) as (_, change):
        change(RunChange("failure", 1, "failed", FAILURE, "starting again"))
        change(RunChange("restart", 1, "failed", FAILURE, "starting again"))
        change(RunChange("end", 2, "finished"))
    documents = [json.loads(line) for line in log.read_text().splitlines()]
    assert [d["event"] for d in documents] == ["failure", "restart", "end"]
    first = documents[0]
    assert (first["name"], first["attempt"], first["words"]) == ("a", 1, "starting again")
    assert first["failure"]["error"] == FAILURE.error and first["schema"] == "mpctl.hook/1"
    assert documents[-1]["failure"] is None and events == []


def test_a_hook_that_fails_or_hangs_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    python = [sys.executable, "-c"]
    assert call_hook([*python, "import sys; sys.exit('no mail server')"], {}) == ("it ended with 1: no mail server")
    assert "cannot be run" in call_hook(["/no/such/program"], {})
    monkeypatch.setattr(monitoring, "HOOK_SECONDS", 0.2)
    assert "ended after 0.2 s" in call_hook([*python, "import time; time.sleep(60)"], {})


def test_steps_done_again_and_waits_are_no_goodput() -> None:
    records = [record(1, 11.0), record(2, 12.0), record(3, 13.0), record(2, 20.0)]
    assert recorded_goodput(records) == pytest.approx(2 / 10)
    assert recorded_goodput([]) is None
    without_time = {"step": 1, "step_seconds": 1.0}
    assert recorded_goodput([without_time]) is None


def test_a_launch_is_watched_from_outside(tmp_path: Path, data: Path) -> None:
    """End to end, with its own processes."""
    log, target = tmp_path / "log", tmp_path / "a.prom"
    hook = json.dumps([sys.executable, "-c", HOOK, str(log)])
    ran = launch(
        data,
        tmp_path / "run",
        "--set",
        f"launch.hook={hook}",
        "--set",
        f"launch.metrics={json.dumps(str(target))}",
        "--set",
        "training.steps=3",
        "--json",
    ).ended()
    assert 0 < ran.summary["goodput"] <= 1
    (document,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert (document["event"], document["status"], document["step"]) == ("end", "finished", 3)
    text = target.read_text()
    assert 'mpctl_step{run="tiny"} 3.0' in text and 'mpctl_up{run="tiny"} 0.0' in text


def test_a_bad_target_is_refused_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["launch", "demo", "--set", "launch.metrics=x", "--dry-run", "--json"]
    assert mpctl(argv) == 2
    assert "bad-value" in {i["rule"] for i in json.loads(capsys.readouterr().out)["issues"]}
