"""Layouts from words, those of a job at other world sizes, the built-in set and its names."""

from __future__ import annotations

from collections import Counter

import pytest

from mpctl.core.errors import InputError
from mpctl.measure.bench.layouts import (
    DEFAULT_LAYOUTS,
    DEFAULT_SETTINGS,
    QUICK_LAYOUTS,
    Layout,
    file_name,
    job_layouts,
    layout_name,
    layout_overrides,
    numbered_titles,
    parse_layouts,
    parse_worlds,
    ranks_of,
)
from mpctl.plan.planning.layout_settings import layout_of
from mpctl.plan.planning.plan import load_plan
from mpctl.plan.rules.launched import why_not_launched
from mpctl.spec.load import load_job


def names(layouts):
    return [layout.name for layout in layouts]


def test_every_combination_is_a_layout_of_its_own_world():
    """dp takes what the others leave of a world, unless a word has it; chunks need a pipeline."""
    for words, worlds, found in (
        (["tp=1,2", "pp=1,2"], None, ["1 rank", "pp2", "tp2", "tp2 pp2"]),
        (["tp=1,2 pp=1,2"], [4], ["dp4", "dp2 pp2", "tp2 dp2", "tp2 pp2"]),
        (["tp=1,2", "dp=1,2"], [1, 2], ["1 rank", "dp2", "tp2"]),
        (["pp=2", "zero=0,1"], None, ["pp2 zero0", "pp2 zero1"]),
        (["pp=1,2", "vpp=1,2"], None, ["1 rank vpp1", "pp2 vpp1", "pp2 vpp2"]),
    ):
        assert names(parse_layouts(words, worlds)) == found
    sizes = [layout.world_size for layout in parse_layouts(["tp=1,2", "pp=1,2", "zero=0"])]
    assert sizes == [1, 2, 2, 4]


def test_words_that_name_no_sizes_are_refused():
    for words in ("", "tp", "tp=", "tp=1,x", "tp=0", "tp=-1", "sp=2", "tp=1 tp=2", "tp=1,,2", "zero=-1", "tp=99999999"):
        with pytest.raises(InputError, match="--layouts"):
            parse_layouts([words])


def test_chunks_of_a_stage_alone_are_refused():
    with pytest.raises(InputError, match="name pp"):
        parse_layouts(["vpp=2"])
    with pytest.raises(InputError, match="makes 2 ranks"):
        parse_layouts(["vpp=2"], [2])


def test_all_bad_words_and_all_worlds_without_layout_are_reported_together():
    with pytest.raises(InputError) as refused:
        parse_layouts(["tp=x", "foo=1"])
    assert len(refused.value.issues) == 2
    with pytest.raises(InputError) as refused:
        parse_layouts(["tp=2"], [1, 2, 3])
    assert [issue.message.split()[-2] for issue in refused.value.issues] == ["1", "3"]


def test_more_layouts_than_anybody_times_are_refused():
    sizes = ",".join(map(str, range(1, 18)))
    with pytest.raises(InputError, match="289 layouts"):
        parse_layouts([f"tp={sizes}", f"pp={sizes}"])


def test_bad_worlds_are_refused():
    for text in ("", "1,,2", "0", "two", "1,-2"):
        with pytest.raises(InputError, match="--world"):
            parse_worlds(text)


def test_along_says_which_axis_takes_the_ranks():
    parallel = load_job(None, {"parallel.tp": 2, "parallel.pp": 3}).parallel
    for along, found in (("tp", "tp4"), ("dp", "dp4"), ("pp", "pp4"), ("cp", "cp4"), ("job", "tp2 dp2")):
        assert names(job_layouts(parallel, [4], along)) == [found]


def test_the_axes_of_the_job_come_before_dp():
    parallel = load_job(None, {"parallel.tp": 2, "parallel.pp": 2, "parallel.cp": 2}).parallel
    worlds = job_layouts(parallel, [1, 2, 4, 8, 16], "job")
    assert names(worlds) == ["1 rank", "tp2", "tp2 cp2", "tp2 cp2 pp2", "tp2 cp2 dp2 pp2"]


def test_what_needs_an_axis_is_left_out_with_it():
    shape = {
        "parallel.tp": 2,
        "parallel.pp": 2,
        "parallel.vpp": 2,
        "model.layers": 8,
        "parallel.sequence_parallel": True,
        "parallel.schedule": "interleaved",
        "cluster.gpus_per_node": 4,
    }
    job = load_plan("demo", shape).job
    for layout in job_layouts(job.parallel, [1, 2, 4], "job"):
        assert load_plan("demo", {**shape, **layout.settings(job)}).job.world_size in (1, 2, 4)
    alone = Layout({"tp": 1, "cp": 1, "dp": 1, "pp": 1}, {}).settings(job)
    assert alone["parallel.sequence_parallel"] is False and alone["parallel.vpp"] == 1


def test_ranks_fill_nodes_of_a_job_that_has_several():
    job = load_job(None, {"cluster.nodes": 2, "cluster.gpus_per_node": 2, "parallel.dp": 4})
    for world, expected in [(1, (1, 1)), (2, (1, 2)), (4, (2, 2))]:
        settings = job_layouts(job.parallel, [world], "dp")[0].settings(job)
        assert (settings["cluster.nodes"], settings["cluster.gpus_per_node"]) == expected


def name_of(**settings: object) -> str:
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return layout_name(layout_of(load_job("demo", {"parallel.tp": 1, **named})))


def test_names_have_the_differences_from_a_single_rank() -> None:
    assert name_of(cluster__gpus_per_node=1) == "1 rank"
    assert name_of(cluster__gpus_per_node=4, parallel__tp=2) == "tp2 dp2"
    four = {"cluster__gpus_per_node": 4, "parallel__pp": 2, "parallel__vpp": 2}
    assert name_of(**four, parallel__zero=1) == "dp2 pp2 vpp2 zero1"
    assert (
        name_of(
            cluster__gpus_per_node=2, parallel__tp=2, parallel__sequence_parallel=True, training__recompute="selective"
        )
        == "tp2 sp recompute-selective"
    )
    grid = {"parallel__tensor_mode": "2.5d", "parallel__tensor_depth": 1}
    assert name_of(cluster__gpus_per_node=4, parallel__tp=4, **grid) == "tp4 2.5d-1"


def test_the_built_in_set_has_twelve_layouts_and_more_of_one_to_four_ranks() -> None:
    ranks = Counter(map(ranks_of, DEFAULT_LAYOUTS))
    assert set(ranks) == {1, 2, 4} and ranks.total() == 20
    seen = {key for layout in DEFAULT_LAYOUTS for key in layout}
    assert {"tp", "cp", "dp", "pp", "vpp", "zero", "sequence_parallel", "recompute"} <= seen
    assert {1, 3} <= {layout.get("zero") for layout in DEFAULT_LAYOUTS}
    assert all(layout in DEFAULT_LAYOUTS for layout in QUICK_LAYOUTS)


def test_each_of_the_set_is_legal_launched_and_forecast() -> None:
    """On the small demo model; a job with other settings is put into the layout all the same."""
    other = {"parallel.pp": 2, "training.recompute": "selective", **DEFAULT_SETTINGS}
    for layout in DEFAULT_LAYOUTS:
        plan = load_plan("demo", {**other, **layout_overrides(layout)})
        assert not why_not_launched(plan.job), layout
        assert plan.job.world_size == ranks_of(layout)
        assert plan.estimate is not None and not isinstance(plan.estimate.time, str), layout


def test_every_name_of_the_set_is_its_own() -> None:
    names = [
        layout_name(layout_of(load_job("demo", {**DEFAULT_SETTINGS, **layout_overrides(layout)})))
        for layout in DEFAULT_LAYOUTS
    ]
    assert len(set(map(file_name, names))) == len(DEFAULT_LAYOUTS)
    assert names[1] == "1 rank recompute" and names[-1] == "tp4 2d"


def test_titles_that_make_the_same_file_are_numbered() -> None:
    titles = numbered_titles(["a tp2", "a-tp2", "A tp2", "b"])
    assert titles == ["a tp2", "a-tp2 (2)", "A tp2 (3)", "b"]
    assert len({file_name(title) for title in titles}) == 4
    assert file_name("../../etc/passwd") == "etc-passwd" and file_name("///") == "case"
