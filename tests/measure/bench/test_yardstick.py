"""The yardstick: a process that times a layer on request, and its times by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from mpctl.core.errors import RunFailed
from mpctl.measure.bench.kernel_cases import kernel_cases
from mpctl.measure.bench.yardstick import LOG, YardstickTimes, cpu_yardstick
from mpctl.records.rundir.requests import KernelCase
from mpctl.run.hosts.machine import Machine
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.train.runtime.probes.pace import RUNS, seconds_of


def test_the_usual_pace_is_the_median() -> None:
    yardsticks = YardstickTimes([2.0, 1.0, 4.0])
    assert yardsticks.usual == 2.0 and yardsticks.factor(4.0) == 0.5 and yardsticks.drift == 3.0
    assert YardstickTimes().factor(1.0) == 1.0 and YardstickTimes().drift == 0.0


def test_the_first_run_is_a_warm_up() -> None:
    """By a clock that each run moves on by 100, 1, 2, 3, 4 and 5 s."""
    now, steps = [0.0], iter([100.0, 1.0, 2.0, 3.0, 4.0, 5.0])

    def work() -> None:
        now[0] += next(steps)

    assert RUNS == 5 and seconds_of(work, lambda: now[0]) == 3.0


def layer() -> tuple[JobSpec, KernelCase]:
    job = load_job("demo", {"model.hidden": 32, "model.heads": 2, "parallel.tp": 1})
    cases = kernel_cases(job, Machine(2, 0, 2**34), ranks=[1], device="cpu")
    return job, next(kernel.case for kernel in cases.kernels if kernel.is_layer)


@pytest.mark.slow
def test_a_layer_is_timed_on_request(tmp_path: Path) -> None:
    with cpu_yardstick(tmp_path, *layer()) as pace:
        assert all(0 < pace() < 1 for _ in range(2))


@pytest.mark.slow
def test_a_process_that_ended_is_said_with_its_log(tmp_path: Path) -> None:
    job, case = layer()
    wrong = cast(KernelCase, {**case, "kernel": "no such"})
    with cpu_yardstick(tmp_path, job, wrong) as pace, pytest.raises(RunFailed, match=LOG):
        _twice(pace)
    assert "KeyError" in (tmp_path / LOG).read_text()


def _twice(pace: Callable[[], float]) -> None:
    pace()
    pace()
