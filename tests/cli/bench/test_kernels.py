"""`mpctl bench kernels` as people call it: what it refuses, and real benches of small shapes."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.calls import Mpctl
from tests.started import started

SMALL = (
    "--set",
    "model.layers=2",
    "--set",
    "model.hidden=32",
    "--set",
    "model.heads=4",
    "--set",
    "model.vocab=128",
    "--set",
    "model.seq_length=16",
    "--set",
    "model.family=gpt",
    "--cluster",
    "this-machine",
    "--device",
    "cpu",
)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("--ranks", "0"), "bad-ranks"),
        (("--ranks", "1,two"), "bad-ranks"),
        (("--dtype", "fp32,fp8"), "kernel-dtype"),
        (("--dtype", "double"), "kernel-dtype"),
        (("--budget", "0"), "bad-budget"),
        (("no-such-job",), "no-such-job"),
        (("demo", "--tp", "3"), "tp-divides-heads"),
        (("--micro-batch-size", "1000000"), "kernels-memory"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    mpctl: Mpctl, tmp_path: Path, words: tuple[str, ...], rule: str
) -> None:
    out = tmp_path / "out"
    said = mpctl("bench", "kernels", *words, "--device", "cpu", "--out", str(out), "--json")
    assert said.code == 2 and rule in said.issues
    assert not out.exists()


def test_a_folder_that_cannot_be_made_is_refused(mpctl: Mpctl, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = mpctl("bench", "kernels", *SMALL, "--out", str(tmp_path / "file" / "out"), "--json")
    assert said.code == 2 and said.issues


@pytest.mark.slow
def test_every_kernel_by_one_rank_and_by_two(mpctl: Mpctl, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--ranks", "1,2", "--rounds", "2", "--dtype", "fp32,bf16", "--out", str(out))
    said = mpctl("bench", "kernels", *SMALL, *words, "--json")
    assert said.code == 0
    report = json.loads(said.out)
    assert report == json.loads((out / "report.json").read_text())
    assert report["bench"] == "kernels" and report["is_complete"]
    rows = report["results"]
    assert {(row["ranks"], row["dtype"]) for row in rows} == {
        (ranks, dtype) for ranks in (1, 2) for dtype in ("fp32", "bf16")
    }
    assert len({row["name"] for row in rows}) == len(rows)
    assert all(row["rounds"] == 2 and row["seconds"] > 0 for row in rows)
    assert all(row["share_of_peak"] > 0 and row["predicted_seconds"] > 0 for row in rows)
    table = list(csv.DictReader((out / "report.csv").open()))
    assert [row["name"] for row in table] == [row["name"] for row in rows]
    assert mpctl("bench", "kernels", *SMALL, *words).code == 2  # the first report stays


@pytest.mark.slow
def test_ctrl_c_keeps_the_rounds_that_ended(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["bench", "kernels", *SMALL, "--rounds", "10000", "--out", str(out), "--json"]
    command = [sys.executable, "-m", "mpctl", *words]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not (out / "report.json").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    report = json.loads(printed)
    assert not report["is_complete"] and report["results"]
    assert report == json.loads((out / "report.json").read_text())
