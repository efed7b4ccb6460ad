"""`mpctl calibrate`: rows in, presets out, a table of errors; bad rows are refused in words."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from mpctl.spec.runtime import RuntimeProfile
from tests.calibrate.test_run_dirs import write_run
from tests.cli.calls import Mpctl

ROWS = json.loads((Path(__file__).parent.parent / "recorded" / "published_runs.json").read_text())


def test_runs_become_presets(mpctl: Mpctl, tmp_path: Path) -> None:
    rows = [row for row in ROWS["rows"] if row["group"] == "vtrain_multi"][:4]
    runs, out = tmp_path / "runs.json", tmp_path / "out"
    runs.write_text(json.dumps({"rows": rows}))
    said = mpctl("calibrate", str(runs), "--out", str(out), "--rounds", "2")
    assert said.code == 0
    assert "vtrain_multi" in said.out
    text = (out / "runtimes" / "megatron-deepspeed.toml").read_text()
    assert text.startswith("# Fitted by `mpctl calibrate` to 4 runs (vtrain_multi)")
    assert RuntimeProfile.model_validate(tomllib.loads(text)).seen.gpus == 512


def test_bad_runs_are_refused(mpctl: Mpctl, tmp_path: Path) -> None:
    bad = tmp_path / "runs.json"
    for text, words in (("{", "bad-runs"), ("[]", "no rows"), ('[{"job": {}}]', "a run has")):
        bad.write_text(text)
        said = mpctl("calibrate", str(bad), "--out", str(tmp_path / "out"))
        assert said.code == 2
        assert words in said.out + said.err
    assert mpctl("calibrate", str(tmp_path / "none.json"), "--out", str(tmp_path)).code == 2


def test_run_directories_are_taken_as_they_lie(mpctl: Mpctl, tmp_path: Path) -> None:
    for name, steps in (("tp1-r1", 0.8), ("tp1-r2", 0.9)):
        write_run(tmp_path / "bench" / name, (steps,) * 3)
    said = mpctl("calibrate", str(tmp_path / "bench"), "--out", str(tmp_path / "out"))
    assert said.code == 0
    assert "bench     2" in said.out
    assert (tmp_path / "out" / "clusters" / "this-machine.toml").exists()
    said = mpctl("calibrate", str(tmp_path), "--cluster", "none", "--out", str(tmp_path / "out"))
    assert said.code == 2 and "none" in said.err
