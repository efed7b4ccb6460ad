"""`mpctl bench verify` as people call it: what it refuses, and one real verification."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.calls import Mpctl
from tests.measure.bench.small_jobs import small_settings

ONE_RANK = ("--nodes", "1", "--gpus-per-node", "1", "--tp", "1")


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("--within", "0"), "bad-within"),
        (("--within", "-5"), "bad-within"),
        (("--within", "nan"), "bad-within"),
        (("--budget", "0"), "bad-budget"),
        (("--tp", "2"), "layout-setting"),
        (("--set", "zero=1"), "layout-setting"),
        (("--layouts", "tq=1,2"), "bad-layouts"),
        (("--layouts", "tp=1,2", "pp=1,x"), "bad-layouts"),
        (("--layouts", "tp=1,3", "pp=1,2"), "tp-divides-heads"),
        (("demo", "demo-llama", "--layouts", "tp=1,2"), "usage"),
        (("no-such-job",), "no-such-job"),
        (("demo", "no-such-job"), "no-such-job"),
        (("demo", "--tp", "3"), "tp-divides-heads"),
        (("demo", "--cluster", "dgx-h100", *ONE_RANK), "verify-device"),  # the demo runs on CPU
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    mpctl: Mpctl, tmp_path: Path, words: tuple[str, ...], rule: str
) -> None:
    out = tmp_path / "out"
    said = mpctl("bench", "verify", *words, "--out", str(out), "--json")
    assert said.code == 2 and rule in said.issues
    assert not out.exists()


def test_a_folder_of_something_else_is_not_touched(mpctl: Mpctl, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    said = mpctl("bench", "verify", "--out", str(tmp_path), "--overwrite", "--json")
    assert said.code == 2 and "bench-foreign" in said.issues
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_two_jobs_are_run_and_compared(mpctl: Mpctl, tmp_path: Path) -> None:
    """One rank and two replicas of a narrow model: every byte as planned. No forecast is right to
    0.001 %, so that --within fails."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(24):
        words = " ".join(f"word{(number * 7 + k) % 101}" for k in range(400))
        (texts / f"{number}.txt").write_text(words)
    shape = [word for key, value in small_settings(texts).items() for word in ("--set", f"{key}={json.dumps(value)}")]
    out, batch = tmp_path / "out", ("--micro-batch-size", "2", "--global-batch-size", "8")
    for name, ranks in (("one", 1), ("two", 2)):
        (tmp_path / f"{name}.toml").write_text(
            f'preset = "demo"\n[cluster]\npreset = "this-machine"\ngpus_per_node = {ranks}\n[parallel]\ntp = 1\n'
        )
    files = [str(tmp_path / f"{name}.toml") for name in ("one", "two")]
    options = ("--steps", "4", "--rounds", "2", "--within", "0.001", "--out", str(out), "--json")
    said = mpctl("bench", "verify", *files, *shape, *batch, *options)
    assert said.code == 1, said.err
    report = said.document
    assert report == json.loads((out / "report.json").read_text())
    rows = report["results"]
    assert [row["name"] for row in rows] == ["one 1 rank", "two dp2"]
    assert [row["rounds"] for row in rows] == [2, 2] and report["is_complete"]
    assert all(row["agrees"] for row in rows), [row["differs"] for row in rows]
    assert rows[1]["sent_bytes"] == rows[1]["planned_sent_bytes"] > 0
    assert all(row["memory_bytes"] > 0 and row["predicted_seconds"] > 0 for row in rows)
    assert report["findings"]["passed"] is False
    assert (out / "one-1-rank-r1").is_dir() and (out / "two-dp2-r2").is_dir()
    assert (out / "report.csv").read_text().startswith("name,")
