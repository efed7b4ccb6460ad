"""The options that benches share: added to a command, which receives them as one value."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from mpctl.cli.bench.common import BenchCommand, QuickOption, with_bench
from mpctl.cli.options import JobSource
from mpctl.core.errors import InputError

JOB = JobSource("demo", {"training.steps": 7})
SHARED = {"device", "out", "overwrite", "quick", "budget", "as_json"}
Received = list[tuple[BenchCommand, str]]


def test_a_command_receives_shared_options_as_a_value_and_keeps_its_own() -> None:
    """Its option `name` is not the name of the bench."""
    received: Received = []

    @with_bench("kernels")
    def command(job: JobSource, bench: BenchCommand, name: str = "here") -> None:
        received.append((bench, name))

    assert set(inspect.signature(command).parameters) == {"job", "name"} | SHARED
    assert command.__annotations__["quick"] == QuickOption
    shared = dict.fromkeys(SHARED - {"as_json", "quick"})
    command(job=JOB, name="mine", quick=True, as_json=False, **shared)
    assert received == [(BenchCommand("kernels", quick=True, overwrite=None), "mine")]


def test_a_budget_of_no_time_is_refused_before_the_command_runs() -> None:
    with pytest.raises(InputError, match="no time"):
        BenchCommand("kernels", budget=0.0)
    assert BenchCommand("kernels").seconds is None
    assert BenchCommand("kernels", quick=True).seconds == 45.0
    assert BenchCommand("kernels", quick=True, budget=9.0).seconds == 9.0


def test_the_folder_stays_the_one_that_was_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bench = BenchCommand("kernels")
    bench.folder.mkdir(parents=True)
    (bench.folder / "report.json").write_text("{}")
    assert bench.folder == Path("runs/bench-kernels")
    assert BenchCommand("kernels").folder == Path("runs/bench-kernels-2")


def test_the_command_line_wins_over_the_steps_of_the_bench() -> None:
    quick = BenchCommand("verify", quick=True, device="cpu")
    assert quick.job(JOB, steps=10, quick_steps=6).overrides["training.steps"] == 7
    assert quick.job(JobSource("demo"), steps=10, quick_steps=6).overrides == {
        "training.steps": 6,
        "launch.device": "cpu",
    }
