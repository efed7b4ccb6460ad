"""A search answers with one row an idea, the plainest of what is as fast."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.planning.layout_settings import LayoutSettings
from mpctl.search.find import (
    ALIKE,
    WIDE_BAND,
    EvaluatedLayout,
    Idea,
    LayoutGroup,
    complexity,
    find_layouts,
    plainest_first,
)
from mpctl.search.space import SearchSpace
from mpctl.units import seconds_text
from tests.cli.calls import Mpctl, caller
from tests.search.test_search import job_of

PLAIN = LayoutSettings(tp=4, dp=8, pp=2, vpp=4, sequence_parallel=True, zero=1)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Mpctl:
    return caller(capsys)


@pytest.mark.parametrize(
    "changes",
    [
        {"vpp": 8}, {"vpp": 5}, {"cp": 2, "dp": 4}, {"micro_batch_size": 2},
        {"micro_batch_size": 3}, {"recompute": "selective"}, {"recompute": "full"}, {"zero": 2},
        {"schedule": "zero-bubble", "vpp": 1}, {"stage_balance": "cost"},
        {"order": "tp-dp-cp-pp"}, {"pp": 4, "dp": 4}, {"tp": 8, "dp": 4},
    ],
    ids=str,
)  # fmt: skip
def test_every_change_of_a_plain_layout_makes_it_less_plain(changes: dict[str, Any]) -> None:
    base = PLAIN._replace(vpp=1) if "schedule" in changes else PLAIN
    assert complexity(base._replace(**changes)) > complexity(base)


def test_groups_are_what_a_list_of_all_layouts_gives() -> None:
    """By hand: the fastest of each tp, pp and mode that fits, what is within 1 % of it, and the
    plainest of those."""
    space = SearchSpace(job_of(), {"cp": 1, "recompute": "none", "zero": 1})
    found = find_layouts(space, top=4, exhaustive=True)
    limit = 0.95 * 24 * 2**30
    by_idea: dict[Idea, list[EvaluatedLayout]] = {}
    for point in found.evaluated:
        if point.bytes <= limit:
            by_idea.setdefault(point.idea, []).append(point)
    fastest = sorted(by_idea.values(), key=lambda points: min(points))[:4]
    assert len(fastest) == len(found.groups) == 4
    assert {group.plainest.idea for group in found.groups} == {points[0].idea for points in fastest}
    for group in found.groups:
        points = by_idea[group.plainest.idea]
        near = [p for p in points if p.seconds <= min(points).seconds * (1 + ALIKE)]
        unordered = {p.layout._replace(order="") for p in near}  # one order of each stays
        assert {p.layout._replace(order="") for p in group.members} == unordered
        assert group.members[0] == min(points)
        least = min(complexity(p.layout) for p in group.members)
        assert complexity(group.plainest.layout) == least
        assert group.plainest not in group.others and len(group.others) == len(group.members) - 1
    steps = [group.plainest.seconds for group in found.groups]
    assert steps == sorted(steps)


def test_the_best_so_far_is_told_while_a_search_goes_on() -> None:
    said: list[str] = []
    space = SearchSpace(job_of(), {"cp": 1, "recompute": "none", "zero": 1})
    found = find_layouts(space, top=2, on_note=said.append)
    fastest = min(group.members[0].seconds for group in found.groups)
    assert said[-1].endswith(f"estimated, best {seconds_text(fastest)}") and len(said) > 2


def test_where_the_band_is_wide_the_plainest_goes_first() -> None:
    odd = LayoutGroup((EvaluatedLayout(1.0, 7, PLAIN._replace(cp=4, vpp=20)),))
    plain = LayoutGroup((EvaluatedLayout(1.09, 7, PLAIN),))
    slow = LayoutGroup((EvaluatedLayout(1.2, 7, PLAIN._replace(pp=1, vpp=1)),))
    groups = [odd, plain, slow]
    assert plainest_first(groups, WIDE_BAND - 0.1) == groups
    assert plainest_first(groups, WIDE_BAND) == [plain, odd, slow]  # slow is 20 % behind
    assert plainest_first([], 5.0) == []


SEARCH = ("search", "--cluster", "dgx-h100", "--nodes", "4", "--model", "llama-3-8b",
          "--global-batch-size", "32", "--runtime")  # fmt: skip


def test_rows_are_different_layouts_and_say_what_they_stand_for(call: Mpctl) -> None:
    said = call(*SEARCH, "megatron-core", "--json")
    best = said.document["best"]
    ideas = [tuple(e["settings"][k] for k in ("tensor_mode", "tp", "pp")) for e in best]
    assert len(set(ideas)) == len(ideas) > 2 and not said.document["is_plain_first"]
    (first, *_) = [entry for entry in best if entry["alike"]]
    assert f"and {len(first['alike'])} more within" in first["alike_text"]
    for one in first["alike"]:
        assert abs(one["step_seconds"] / first["step_seconds"] - 1) <= 2 * ALIKE
        assert one["settings"]["tp"] == first["settings"]["tp"]
    text = " ".join(call(*SEARCH, "megatron-core").out.split())
    assert "a row is the plainest of what is within 1 % at its tp and pp" in text
    assert "optimistic, by 1 to 7 % in published sweeps" in text


def test_a_wide_band_is_said(call: Mpctl) -> None:
    said = call(*SEARCH, "torchtitan", "--json")
    best = said.document["best"]
    assert best[0]["step_seconds_high"] / best[0]["step_seconds_low"] > WIDE_BAND
    most = 1.1 * min(entry["step_seconds"] for entry in best)
    near = [LayoutSettings(**e["settings"]) for e in best if e["step_seconds"] <= most]
    assert complexity(near[0]) == min(map(complexity, near))
    if said.document["is_plain_first"]:
        assert "no. 1 is the plainest within 10 %" in call(*SEARCH, "torchtitan").out
