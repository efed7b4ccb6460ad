"""What a launch and `mpctl show` say of a run."""

from __future__ import annotations

from typing import Any

from mpctl.records.rundir.summary import training_progress
from mpctl.render.run import summary_rows

STEP: Any = {"step": 1, "loss": 2.0, "tokens": 8, "step_seconds": 2.0, "tokens_per_second": 4.0}


def rows(**more: Any) -> dict[str, str]:
    summary: Any = {
        **training_progress([{**STEP, **more}]),
        "predicted_step_seconds": None,
        "saves": None,
        "plan_beside_run": [],
    }
    return dict(summary_rows(summary))


def test_the_time_in_collectives_stands_by_axis_the_longest_first() -> None:
    """By hand: 0.5 and 0.25 of 2 s are 38 %."""
    said = rows(communication_seconds={"pp": 0.25, "tp": 0.5})
    assert said["communication"] == "38% of rank 0's step: tp 500.0 ms, pp 250.0 ms"
    assert "communication" not in rows(communication_seconds={})
    assert "communication" not in rows()


def test_the_users_presets_stand_behind_the_forecast() -> None:
    source = {"path": "presets/clusters/a.toml", "kind": "clusters", "name": "a", "hides": True}
    summary: Any = {
        **training_progress([STEP]),
        "predicted_step_seconds": 1.5,
        "figures_from": [source],
        "saves": None,
        "plan_beside_run": [],
    }
    assert dict(summary_rows(summary))["figures"] == "./presets/clusters/a.toml hides the bundled one"


def test_goodput_is_a_row_where_much_of_the_time_was_lost() -> None:
    steps = [{**STEP, "step": step, "time": 10.0 + 2 * step} for step in (1, 2, 3)]
    late = {**STEP, "step": 4, "time": 30.0}
    more: Any = {"predicted_step_seconds": None, "saves": None, "plan_beside_run": []}
    said = [dict(summary_rows({**training_progress(found), **more})) for found in (steps, [*steps, late])]
    assert "goodput" not in said[0] and said[1]["goodput"].startswith("40.0%")


def test_the_load_of_experts_is_reported() -> None:
    figures = {"aux_loss": 0.0125, "expert_load": 1.5, "rank_load": 1.25}
    load = "fullest expert 1.50, fullest rank 1.25 times the mean; auxiliary loss 0.0125"
    assert rows(**figures, near_ties=3)["experts"] == f"{load}, 3 near ties a step"
    assert rows(**figures, near_ties=0)["experts"] == load
    assert "experts" not in rows()


def test_a_run_on_a_gpu_says_its_utilization_and_what_the_allocator_took() -> None:
    def rows(more: dict[str, Any], device: str | None) -> dict[str, str]:
        compared = {
            "agrees": True,
            "step_traffic": {"planned": {}, "measured": {}},
            "memory": {},
            "rank": 0,
            "peak_memory_bytes": 10 << 30,
            "device": device,
            "reserved_memory_bytes": 12 << 30 if device else None,
        }
        summary: Any = {
            **training_progress([{**STEP, **more}]),
            "predicted_step_seconds": None,
            "saves": None,
            "plan_beside_run": [compared],
        }
        return dict(summary_rows(summary))

    known = rows({"mfu": 0.451, "hfu": 0.5}, "NVIDIA H200")
    assert known["MFU, HFU"] == "45.1%, 50.0% of the data sheet of NVIDIA H200, attention counted in full"
    assert known["peak memory"].endswith("12.0 GiB reserved by the allocator")
    assert "name cluster.device" in rows({}, "a GPU of tomorrow")["MFU, HFU"]
    assert "MFU, HFU" not in rows({}, None) and "reserved" not in rows({}, None)["peak memory"]
