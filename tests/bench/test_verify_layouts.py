"""Short names of layouts, and the built-in set: what it is made of, and that all of it can run."""

from __future__ import annotations

from collections import Counter

import pytest

from mpctl.bench.layouts import (
    DEFAULT_LAYOUTS,
    DEFAULT_SETTINGS,
    QUICK_LAYOUTS,
    file_name,
    layout_name,
    layout_overrides,
    ranks_of,
    told_apart,
)
from mpctl.planning.layout_settings import layout_of
from mpctl.planning.plan import load_plan
from mpctl.rules.launched import why_not_launched
from mpctl.spec.load import load_job


def name_of(**settings: object) -> str:
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return layout_name(layout_of(load_job("demo", {"parallel.tp": 1, **named})))


def test_names_tell_what_a_single_rank_has_not() -> None:
    assert name_of(cluster__gpus_per_node=1) == "1 rank"
    assert name_of(cluster__gpus_per_node=4, parallel__tp=2) == "tp2 dp2"
    four = {"cluster__gpus_per_node": 4, "parallel__pp": 2, "parallel__vpp": 2}
    assert name_of(**four, parallel__zero=1) == "dp2 pp2 vpp2 zero1"
    assert name_of(cluster__gpus_per_node=2, parallel__tp=2, parallel__sequence_parallel=True,
                   training__recompute="selective") == "tp2 sp recompute-selective"  # fmt: skip
    grid = {"parallel__tensor_mode": "2.5d", "parallel__tensor_depth": 1}
    assert name_of(cluster__gpus_per_node=4, parallel__tp=4, **grid) == "tp4 2.5d-1"


def test_the_built_in_set_has_twelve_layouts_and_more_of_one_to_four_ranks() -> None:
    ranks = Counter(map(ranks_of, DEFAULT_LAYOUTS))
    assert set(ranks) == {1, 2, 4} and ranks.total() == 20
    seen = {key for layout in DEFAULT_LAYOUTS for key in layout}
    assert {"tp", "cp", "dp", "pp", "vpp", "zero", "sequence_parallel", "recompute"} <= seen
    assert {1, 3} <= {layout.get("zero") for layout in DEFAULT_LAYOUTS}
    assert all(layout in DEFAULT_LAYOUTS for layout in QUICK_LAYOUTS)


@pytest.mark.parametrize("layout", DEFAULT_LAYOUTS, ids=str)
def test_each_of_the_set_is_legal_launched_and_forecast(layout: dict[str, object]) -> None:
    """On the small demo model; a job with other settings is put into the layout all the same."""
    other = {"parallel.pp": 2, "training.recompute": "selective", **DEFAULT_SETTINGS}
    plan = load_plan("demo", {**other, **layout_overrides(layout)})
    assert not why_not_launched(plan.job)
    assert plan.job.world_size == ranks_of(layout)
    assert plan.estimate is not None and not isinstance(plan.estimate.time, str)


def test_every_name_of_the_set_is_its_own() -> None:
    names = [
        layout_name(layout_of(load_job("demo", {**DEFAULT_SETTINGS, **layout_overrides(layout)})))
        for layout in DEFAULT_LAYOUTS
    ]
    assert len(set(map(file_name, names))) == len(DEFAULT_LAYOUTS)
    assert names[1] == "1 rank recompute" and names[-1] == "tp4 2d"


def test_titles_that_make_the_same_file_are_numbered() -> None:
    titles = told_apart(["a tp2", "a-tp2", "A tp2", "b"])
    assert titles == ["a tp2", "a-tp2 (2)", "A tp2 (3)", "b"]
    assert len({file_name(title) for title in titles}) == 4
    assert file_name("../../etc/passwd") == "etc-passwd" and file_name("///") == "case"
