"""Searches try to overlap experts' messages with another micro batch's work (training.moe_overlap)."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl import load_plan
from mpctl.plan.planning.layout_settings import LayoutSettings, changed_settings, layout_text
from mpctl.plan.search.nearest import faster_nearby
from mpctl.plan.search.result import SearchResult, search_layouts
from mpctl.spec.load import load_job

JOB = {"model": "qwen3-30b-a3b", "cluster": "dgx-h100", "nodes": 8, "gpus_per_node": 8, "runtime": "megatron-core"}
JOB |= {"seq_length": 4096, "global_batch_size": 512, "sequence_parallel": False}
FIXED = ["cp=1", "ep=16", "zero=1", "micro_batch_size=1", "order=tp-cp-dp-pp"]


def search(*fix: str, **settings: Any) -> SearchResult:
    return search_layouts(None, {**JOB, **settings}, fix=[*FIXED, *fix], max_tp=2, max_pp=2, top=3)


def test_the_faster_of_with_and_without_is_a_row() -> None:
    result = search("tp=1")
    assert result.fastest is not None
    layout = result.fastest.layout
    assert layout.moe_overlap and "moe overlap" in layout_text(layout) and "moe_overlap" in result.searched
    assert changed_settings(layout._replace(moe_overlap=False), layout) == {"training.moe_overlap": True}
    settings = changed_settings(LayoutSettings(), layout)
    plans = [load_plan(None, {**JOB, **settings, "training.moe_overlap": on}).estimate for on in (True, False)]
    assert plans[0].step_seconds == pytest.approx(result.fastest.time.total, rel=1e-9)
    assert plans[0].step_seconds < plans[1].step_seconds
    assert result.fastest.bytes == plans[0].fullest_stage.device_bytes > plans[1].fullest_stage.device_bytes


def test_the_second_step_finds_what_a_search_of_overlapped_layouts_finds() -> None:
    found, overlapped = search(), search("moe_overlap=true")
    assert found.fastest is not None and overlapped.fastest is not None
    assert found.fastest.layout == overlapped.fastest.layout
    assert all(row.layout.pp == 1 or row.layout.vpp > 1 for row in overlapped.rows)
    assert {row.layout.recompute for row in overlapped.rows} <= {"none", "selective"}


@pytest.mark.parametrize(
    "settings", [{"runtime": "megatron-core-graphs"}, {"runtime": "torchtitan"}, {"global_batch_size": 64}]
)
def test_what_gains_nothing_is_not_a_row(settings: dict[str, Any]) -> None:
    """Profiles whose runs overlapped already, software without it, and one micro batch a step."""
    result = search("tp=1", "pp=1", **settings)
    every = [layout for row in result.rows for layout in (row.layout, *(point.layout for point in row.alike))]
    assert every and not any(layout.moe_overlap for layout in every)


def test_a_job_nearby_is_offered_the_overlap() -> None:
    plain = {"parallel.ep": 16, "parallel.zero": 1, "training.micro_batch_size": 1}
    offers = faster_nearby(load_job(None, {**JOB, **plain}))
    assert {"training.moe_overlap": True} in [near.changes for near in offers]
