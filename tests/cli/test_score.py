"""`mpctl score`: rows for the gallery, which come from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpctl.plan.planning.plan import load_plan
from tests.cli.calls import Mpctl, assert_refused
from tests.cli.test_documents import require_valid

ROW = {
    "name": "Llama 3 8B, 8 H100",
    "line": "mpctl plan --model llama-3-8b --cluster dgx-h100 --nodes 1 --zero 1 --global-batch-size 128 "
    "--micro-batch-size 1 --runtime megatron-core --recompute full",
    "step_seconds": 15.0,
    "steps": 50,
    "software": "Megatron-LM core_r0.16.0",
    "source": "https://example.org/log.txt",
    "date": "2026-11",
}
SETTINGS = {
    "model": "llama-3-8b",
    "cluster": "dgx-h100",
    "nodes": 1,
    "zero": 1,
    "global_batch_size": 128,
    "micro_batch_size": 1,
    "runtime": "megatron-core",
    "recompute": "full",
}


def test_a_row_is_planned_as_its_line(mpctl: Mpctl, tmp_path: Path) -> None:
    file = tmp_path / "row.json"
    file.write_text(json.dumps([ROW, ROW]), "utf-8")
    said = mpctl("score", file, "--json")
    require_valid(said.document)
    row, same = said.document["rows"]
    estimate = load_plan(None, SETTINGS).estimate
    assert estimate is not None and not isinstance(estimate.time, str) and row == same
    assert row["forecast_seconds"] == estimate.time.total
    assert said.document["mean_error"] == abs(row["error"]) == pytest.approx(abs(estimate.time.total / 15 - 1))
    file.write_text(json.dumps(ROW), "utf-8")
    assert f"{row['error']:+.1%}" in mpctl("score", file).out


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"line": "mpctl plan demo"}, "bad-line"),
        ({"line": "mpctl plan --from megatron @/etc/passwd"}, "bad-line"),
        ({"line": "mpctl plan --model /etc/passwd --gpus 8xh100"}, "bad-line"),
        ({"line": "mpctl plan --gpus 8xh100 --set model.preset=./mine.toml"}, "bad-line"),
        ({"line": "mpctl plan --gpus 8xh100 --model gpt2 --set 'model={preset = \"./mine.toml\"}'"}, "bad-line"),
        ({"line": "mpctl plan --model gpt2 --gpus 8xh100 --set training.init_from=/tmp"}, "bad-line"),
        ({"line": "mpctl plan --model gpt2 --gpus 8xh100 --set data.path=/tmp"}, "bad-line"),
        ({"line": "rm -rf ~; mpctl plan"}, "bad-line"),
        ({"line": "mpctl plan --model 'gpt2"}, "bad-line"),
        ({"line": "mpctl plan --help"}, "bad-line"),
        ({"line": "mpctl plan --gpus 8xh100"}, "no-model"),
        ({"line": "mpctl plan --model gpt2 --gpus 8xh100 --set model.layers=9000"}, "too-large"),
        ({"step_seconds": 15000.0}, "impossible-run"),
        ({"step_seconds": 0.5}, "impossible-run"),
        ({"step_seconds": "15"}, "bad-value"),
        ({"step_seconds": float("nan")}, "bad-value"),
        ({"source": "javascript:alert(1)"}, "bad-value"),
        ({"source": "https://a.b/<script>"}, "bad-value"),
        ({"name": "two\nlines"}, "bad-value"),
        ({"more": 1}, "unknown-key"),
        ({"schema": "mpctl.plan/2"}, "bad-row"),
    ],
)
def test_a_bad_row_is_refused(mpctl: Mpctl, tmp_path: Path, change: dict[str, Any], rule: str) -> None:
    file = tmp_path / "row.json"
    file.write_text(json.dumps(ROW | change), "utf-8")
    said = mpctl("score", file, "--json")
    assert_refused(said, wants_json=True)
    assert set(said.issues) == {rule}


@pytest.mark.parametrize("text", ["", "[]", "3", "[" * 10**5, '{"name": ' + "1" * 2**20])
def test_a_file_that_is_no_row_is_refused(mpctl: Mpctl, tmp_path: Path, text: str) -> None:
    file = tmp_path / "row.json"
    file.write_text(text, "utf-8")
    assert "bad-row" in mpctl("score", file, "--json").issues
