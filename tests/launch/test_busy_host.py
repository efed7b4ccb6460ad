"""A forecast is of a free host; a run on a busy one says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpctl.launch.busy_host import busy_text
from tests.cli.calls import caller


def test_of_a_busy_host_the_load_is_told_beside_the_forecast() -> None:
    said = busy_text(17.3, 2, 0.7196)
    assert said is not None
    assert "17.3 processes ran in the last minute, on 2 processors" in said
    assert "forecast of 719.6 ms" in said
    assert busy_text(0.9, 2, 0.7196) is None
    assert busy_text(17.3, 2, None) is None


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.0, 50.0])
def test_a_run_says_it_before_its_first_step(
    load: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(20):
        words = "".join(f"line {n} of text {number}, {n * n}\n" for n in range(200))
        (texts / f"{number}.txt").write_text(words)
    said = caller(capsys)(
        "launch", "demo", "--tp", 1, "--gpus-per-node", 1, "--steps", 1, "--run-dir",
        tmp_path / "run", "--set", f'data.corpus=["{texts}"]', "--set", "model.layers=1",
        "--set", "model.hidden=32", "--set", "model.vocab=512", "--set", "model.seq_length=32",
        "--set", "training.warmup_steps=0",
    )  # fmt: skip
    assert said.code == 0, said.err
    assert ("this host is busy: 50.0 processes" in said.err) == (load > 1)
