"""Room on the device: its cost in the order of a search, and what the answer says of ties."""

from __future__ import annotations

import pytest

from mpctl import SearchResult, search_layouts
from mpctl.plan.planning.layout_settings import LayoutSettings
from mpctl.plan.search.document import search_document
from mpctl.plan.search.find import EvaluatedLayout
from mpctl.plan.search.room import EDGE, SLOWER, expected_slowdown
from mpctl.render.search import tie_text


def found(gib: float, **more: object) -> SearchResult:
    """A search of a small model on 4 GPUs of so many GiB."""
    settings = {
        "cluster": "dgx-h100",
        "cluster.nodes": 1,
        "cluster.gpus_per_node": 4,
        "cluster.device.memory_bytes": int(gib * 2**30),
        "model.layers": 4,
        "model.hidden": 2048,
        "model.heads": 16,
        "model.vocab": 32000,
        "model.seq_length": 2048,
        "training.global_batch_size": 16,
        "training.dtype": "bf16",
        "training.runtime": "megatron-core",
        **more,
    }
    return search_layouts(None, settings)


def test_a_layout_with_room_keeps_its_seconds_and_a_full_one_counts_longer() -> None:
    assert expected_slowdown(0.0) == expected_slowdown(0.85) == 1.0
    assert 1.0 < expected_slowdown(0.9) < 1.03 < expected_slowdown(0.95) < 1.2
    assert expected_slowdown(EDGE) == pytest.approx((1 + SLOWER) / 2)


def test_a_point_tells_the_step_from_what_it_counts() -> None:
    point = EvaluatedLayout(2.3, 1, LayoutSettings(), 1.15)
    assert point.step_seconds == 2.0


def test_rows_are_ordered_with_room_and_say_what_it_costs() -> None:
    """On a device that the fastest layout of a larger one just fits, it counts longer than its step."""
    free = found(80)
    assert free.fastest is not None
    full = found(free.fastest.bytes / 0.95 / 2**30 + 0.001)
    assert full.fastest is not None
    assert [row.expected_seconds for row in full.rows] == sorted(row.expected_seconds for row in full.rows)
    entries = search_document(full, lambda row: "")["rows"]
    for row, entry in zip(full.rows, entries, strict=True):
        assert entry["step_seconds"] == row.time.total
        assert bool(entry["room"]) == (entry["slowdown"] > 1) == (row.bytes > 0.88 * row.device_memory)
    if full.fastest.layout != free.fastest.layout:
        assert full.fastest.slowdown < expected_slowdown(0.95)


def test_a_tie_names_its_rows_and_the_one_with_most_room_first() -> None:
    result = found(80)
    document = search_document(result, lambda row: "")
    tied = [result.rows[at - 1] for at in document["tied"]]
    assert result.fastest is not None and len(tied) > 1
    most = result.fastest.expected_seconds * (1 + result.error)
    assert sorted(document["tied"]) == [at for at, row in enumerate(result.rows, 1) if row.expected_seconds <= most]
    assert tied[0].bytes == min(row.bytes for row in tied)
    assert f"measure no. {document['tied'][0]} first" in tie_text(document)
