"""What a launch and `mpctl show` say of a run."""

from __future__ import annotations

from typing import Any

from mpctl.render.run import summary_rows
from mpctl.rundir.summary import training_progress

STEP: Any = {"step": 1, "loss": 2.0, "tokens": 8, "step_seconds": 2.0, "tokens_per_second": 4.0}


def rows(**more: Any) -> dict[str, str]:
    summary: Any = {**training_progress([{**STEP, **more}]), "predicted_step_seconds": None,
                    "saves": None, "plan_beside_run": []}  # fmt: skip
    return dict(summary_rows(summary))


def test_the_time_in_collectives_stands_by_axis_the_longest_first() -> None:
    """By hand: 0.5 and 0.25 of 2 s are 38 %."""
    said = rows(communication_seconds={"pp": 0.25, "tp": 0.5})
    assert said["communication"] == "38% of rank 0's step: tp 500.0 ms, pp 250.0 ms"
    assert "communication" not in rows(communication_seconds={})
    assert "communication" not in rows()
