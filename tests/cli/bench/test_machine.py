"""`mpctl bench machine` as people call it: what it refuses, and one real measurement."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpctl.plan.planning.plan import load_plan
from tests.cli.calls import Mpctl
from tests.measure.bench.small_jobs import small_settings
from tests.started import started


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("--name", "../x"), "bad-name"),
        (("--budget", "0"), "bad-budget"),
        (("--tp", "2"), "layout-setting"),
        (("no-such-job",), "no-such-job"),
        (("--cluster", "dgx-h100"), "machine-device"),  # the demo runs on CPU
        (("--model", "no-such-model"), "unknown-preset"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    mpctl: Mpctl, tmp_path: Path, words: tuple[str, ...], rule: str
) -> None:
    out = tmp_path / "out"
    said = mpctl("bench", "machine", *words, "--out", str(out), "--json")
    assert said.code == 2 and rule in said.issues
    assert not out.exists()


def test_a_folder_of_something_else_is_not_touched(mpctl: Mpctl, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    said = mpctl("bench", "machine", "--out", str(tmp_path), "--overwrite", "--json")
    assert said.code == 2 and "bench-foreign" in said.issues
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_a_machine_is_measured_and_planned_on(mpctl: Mpctl, tmp_path: Path, texts: Path) -> None:
    """Kernels and collectives of a narrow model, and four layouts of it: what is written is a
    cluster that plans are made on, with the spread of its own runs."""
    shape, out = narrow_model(texts), tmp_path / "out"
    said = mpctl("bench", "machine", *shape, "--quick", "--steps", "3", "--name", "mine", "--out", str(out), "--json")
    assert said.code == 0, said.err
    report = json.loads(said.out)
    assert report == json.loads((out / "report.json").read_text())
    assert report["schema"] == "mpctl.bench/2" and report["bench"] == "machine"
    assert report["is_complete"] and report["findings"]["wrong"] == []
    assert {"matmul", "triad"} <= {row.get("kernel") for row in report["results"]}
    cluster = load_plan("demo", {"cluster": str(out / "presets/clusters/mine.toml")}).job.cluster
    assert cluster.spread == report["findings"]["spread"]
    assert cluster.cores == report["environment"]["cores"]
    assert all(
        (out / f"{check['layout'].replace(' ', '-')}-r1" / "summary.json").is_file()
        for check in report["findings"]["checks"]
    )
    again = mpctl("bench", "machine", *shape, "--out", str(out))
    assert again.code == 2 and "bench-occupied" in again.err
    mine = str(out / "presets/clusters/mine.toml")
    fitted = mpctl("calibrate", str(out), "--cluster", mine, "--out", str(tmp_path / "fitted"), "--force")
    assert fitted.code == 0, fitted.err


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_ctrl_c_keeps_the_presets_that_were_measured(tmp_path: Path, texts: Path) -> None:
    out = tmp_path / "out"
    words = [
        "bench",
        "machine",
        *narrow_model(texts),
        "--quick",
        "--steps",
        "1000",
        "--name",
        "mine",
        "--out",
        str(out),
        "--json",
    ]
    command = [sys.executable, "-m", "mpctl", *words]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 300
        while not (out / "presets" / "clusters" / "mine.toml").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    report = json.loads(printed)
    assert not report["is_complete"] and report["findings"]["checks"] == []
    assert report == json.loads((out / "report.json").read_text())
    plan = load_plan("demo", {"cluster": str(out / "presets" / "clusters" / "mine.toml")})
    assert plan.estimate is not None and plan.estimate.step_seconds is not None


def narrow_model(texts: Path) -> list[str]:
    """The options that make the demo a model of two narrow layers, trained on these texts."""
    settings = {**small_settings(texts), "model.layers": 2}
    return [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
