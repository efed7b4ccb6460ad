"""Launching jobs whose tensor-parallel ranks are a grid: the curve of one process, plan and run
compared, use of the run afterwards, and a rank of the grid that keeps others waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.calls import spawn
from tests.run.launch.command import endless, launch
from tests.train.runtime.test_axes import SHAPES
from tests.train.runtime.tiny import column, tiny_job, train

SAMPLES = {"training__micro_batch_size": 4}
MODES: list[tuple[str, str, int]] = [("gpt", "2d", 4), ("llama", "2.5d", 4), ("llama", "3d", 8)]


def options(mode: str, tp: int, model: dict[str, Any]) -> list[str]:
    """The arguments of `mpctl launch`."""
    values = {**SAMPLES, **model}
    sets = [f"{key.replace('__', '.')}={value}".lower() for key, value in values.items()]
    own = ["--tp", str(tp), "--tensor-mode", mode]
    return [*own, *(part for one in sets for part in ("--set", one))]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("shape", "mode", "tp"), MODES)
def test_a_grid_is_launched_evaluated_and_sampled(data: Path, tmp_path: Path, shape: str, mode: str, tp: int) -> None:
    model = SHAPES[shape]
    run = launch(data, tmp_path / "run", *options(mode, tp, model)).ended()
    assert run.process.returncode == 0, run.stderr
    alone = column(train(tiny_job(data, **SAMPLES, **model), tmp_path / "one"))
    assert len(alone) == 20 and run.losses == pytest.approx(alone, rel=1e-5)
    compared = run.summary["plan_beside_run"]
    assert [rank["rank"] for rank in compared] == list(range(tp))
    assert all(rank["agrees"] for rank in compared)
    assert "as planned, byte by byte" in run.stdout

    said = spawn("eval", run.run_dir, "--samples", 6, "--json")
    assert said.code == 0, said.err
    (row,) = said.document["corpora"]
    assert row["loss"] == pytest.approx(run.records[-1]["validation_loss"], rel=1e-5)
    said = spawn("sample", run.run_dir, "--prompt", "w1 counts", "--max-tokens", 4, "--json")
    assert said.code == 0 and len(said.document["samples"][0]["tokens"]) == 4


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["true", "false"])
def test_a_stopped_rank_of_a_grid_is_named_with_its_collective(data: Path, tmp_path: Path, transport: str) -> None:
    shared = ("--set", f"launch.shared_memory={transport}")
    run = endless(data, tmp_path / "run", *options("2d", 4, SHAPES["gpt"]), *shared).at_step(2)
    run.worker(3).suspend()
    run.ended()
    failure = run.summary["failure"]
    assert failure["rank"] == 3 and failure["coords"]["row"] == failure["coords"]["col"] == 1
    assert failure["error"].startswith("its process is stopped (SIGSTOP, or a debugger); it ")
    groups = ("group row (ranks 1, 3)", "group col (ranks 2-3)")
    assert any(group in failure["error"] for group in groups)
