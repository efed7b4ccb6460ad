"""The share of a step that is spent in waiting, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpctl.bench.runner import communication_share, planned_share
from mpctl.estimate.step import Band, StepTime
from tests.bench.verify_runs import case_of, run_of


def waited(*shares: float) -> Any:
    """A run whose ranks waited for these shares of a step."""
    reports: Any = [{"rank": n, "communication_share": share} for n, share in enumerate(shares)]
    return replace(run_of(case_of("tp2"), 1.0), reports=reports)


def test_ranks_are_averaged_and_runs_give_their_median() -> None:
    runs = [waited(0.1, 0.3), waited(0.5, 0.7), waited(0.2, 0.4)]
    assert communication_share(runs) == pytest.approx(0.3)
    assert communication_share([*runs[:1], run_of(case_of("tp2"), 1.0)]) == pytest.approx(0.2)
    assert communication_share([run_of(case_of("tp2"), 1.0)]) is None


def test_planned_messages_and_bubbles_are_waited_for() -> None:
    parts = {"compute": 4.0, "tp": 1.0, "cp": 0.5, "pp": 0.25, "dp_cp": 0.25, "bubble": 1.0}
    time = StepTime(**parts, contention=1.0, optimizer=1.0, other=1.0, model_flops=1.0,
                    hardware_flops=1.0, peak=1.0, band=Band(1.1, ()))  # fmt: skip
    assert planned_share(time) == pytest.approx(3 / 10)
