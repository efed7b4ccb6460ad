"""Random small searches: what rows, answers and front of every one must hold."""

from __future__ import annotations

import random
from math import inf
from typing import Any, get_args

import pytest

from mpctl import DoesNotFit, InputError, search_layouts
from mpctl.core.units import plural
from mpctl.plan.search.document import search_document
from mpctl.plan.search.find import AS_FAST, significant
from mpctl.plan.search.plain import complexity
from mpctl.plan.search.result import Goal, LayoutReport, SearchResult, Sort, in_order
from mpctl.render.search import ORDERS, search_parts
from mpctl.spec.runtime import get_profile

RUNTIMES = ("megatron-core", "torchtitan", "fsdp2", "nanotron", "mpctl")
SORTS: tuple[Sort, ...] = get_args(Sort)
FIGURES = {
    "time": lambda row: row.expected_seconds,
    "memory": lambda row: row.bytes,
    "cost": lambda row: significant(row.gpu_hours_per_billion),
    "plain": lambda row: complexity(row.layout, plain_of(row)),
}


def plain_of(row: LayoutReport) -> Any:
    return get_profile(row.job.training.runtime).plain


def random_search(seed: int) -> SearchResult | None:
    """A search of a small model on 2 to 8 GPUs; None where nothing fits."""
    draw = random.Random(seed)
    objective = draw.choice(get_args(Goal))
    nodes, per_node = draw.choice(((1, 2), (1, 4), (2, 2), (2, 4)))
    job = {
        "cluster": draw.choice(("selene", "dgx-h100")),
        "cluster.nodes": nodes,
        "cluster.gpus_per_node": per_node,
        "cluster.device.memory_bytes": draw.choice((6, 10, 16, 40)) * 2**30,
        "model.layers": draw.choice((2, 3, 4)),
        "model.hidden": draw.choice((1024, 2048)),
        "model.heads": 16,
        "model.vocab": 32000,
        "model.seq_length": draw.choice((512, 2048)),
        "training.global_batch_size": draw.choice((8, 12, 16)),
        "training.dtype": "bf16",
        "training.runtime": draw.choice(RUNTIMES),
        **draw.choice(({}, {"cp": 1}, {"recompute": "none"}, {"micro_batch_size": 1}, {"stage_balance": "even"})),
        "order": "tp-cp-dp-pp",
    }
    try:
        return search_layouts(
            None,
            job,
            top=draw.choice((1, 3, 8)),
            objective=objective,
            gpus=[2, per_node] if objective in ("cost", "days") else None,
            tokens=10**9 if objective in ("days", "energy") else None,
            price=2.0,
            sort=draw.choice((None, *SORTS)),
        )
    except DoesNotFit:
        return None
    except InputError as refused:
        assert {issue.rule for issue in refused.issues} == {"no-layout"}
        return None


def beats(one: LayoutReport, other: LayoutReport) -> bool:
    return significant(one.time.total) < significant(other.time.total) and one.bytes < other.bytes


def assert_in_order(rows: list[LayoutReport], sort: Sort) -> None:
    figures = [FIGURES[sort](row) for row in rows]
    assert figures == sorted(figures)
    for at, row in enumerate(rows):
        assert not any(beats(below, row) for below in rows[at + 1 :])


def assert_true(found: SearchResult) -> None:
    """Rows, answers, front and headings say what is so."""
    assert_in_order(found.rows, found.sort)
    for sort in SORTS:
        rows, left_out = in_order(found.rows, sort)
        assert_in_order(rows, sort)
        assert len(rows) + left_out == len(found.rows)
    front = [(row.time.total, row.bytes) for row in found.front]
    every = {(p.step_seconds, p.bytes) for p in found.seen}
    dominated = {p for p in every if any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in every)}
    assert [size for _, size in front] == [size for _, size in sorted(every - dominated)]
    assert [row.layout for row in found.front] == [
        p.layout
        for p in sorted(found.seen, key=lambda p: (p.step_seconds, p))
        if p.layout in {row.layout for row in found.front}
    ]
    best = found.best
    assert best is not None and best.fits and all(row.fits for row in found.rows)
    if found.objective == "memory":
        assert found.fastest is None and found.suggested is None
        assert best.bytes == min(row.bytes for row in found.rows) == min(p.bytes for p in found.seen)
    else:
        assert found.fastest is best and found.suggested is not None
        assert best.expected_seconds == pytest.approx(min(p.seconds for p in found.seen))
        near = [p for p in found.seen if p.seconds <= best.expected_seconds * (1 + found.error)]
        least = min(complexity(p.layout, plain_of(best)) for p in near)
        assert complexity(found.suggested.layout, plain_of(best)) == least
        assert bool(found.suggestion) == (found.suggested is not best)
    for row in (one for one in found.rows if one is not best):
        least = min([row.expected_seconds, *(point.seconds for point in row.alike)]) * (1 + AS_FAST)
        near = [complexity(point.layout, plain_of(row)) for point in row.alike if point.seconds <= least]
        is_plainest = complexity(row.layout, plain_of(row)) <= min(near, default=inf)
        assert row is found.suggested or (row.expected_seconds <= least and is_plainest)
    by_gpus = [choice for choice in found.by_gpus.values() if choice]
    if by_gpus and found.objective == "cost":
        assert best.gpu_hours_per_billion == min(choice.gpu_hours_per_billion for choice in by_gpus)
    assert found.estimated >= len(found.seen)
    document = search_document(found, lambda choice: repr(choice.layout))
    titles = [getattr(part, "title", "") for part in search_parts(document)]
    gpus = f" on {plural(best.job.world_size, 'GPU')}" if found.by_gpus else ""
    assert any(title.startswith(f"Layouts{gpus}, {ORDERS[found.sort]}") for title in titles)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(20, 200, 20))])
def test_no_row_stands_above_one_that_beats_it(first: int) -> None:
    results = [found for seed in range(first, first + 20) if (found := random_search(seed))]
    for found in results:
        assert_true(found)
    assert len(results) > 10
