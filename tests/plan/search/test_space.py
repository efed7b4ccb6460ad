"""Tensor modes in the search: which grids are tried, and that bounds and figures hold for them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from mpctl.plan.estimate.memory import peak_bytes
from mpctl.plan.estimate.system import layer_shape
from mpctl.plan.planning.layout_settings import LayoutSettings, changed_settings, layout_of, layout_text, setting_text
from mpctl.plan.planning.plan import make_plan
from mpctl.plan.rules.validate import check_job
from mpctl.plan.search.bound import StepTimeBound
from mpctl.plan.search.evaluate import LayoutEvaluator
from mpctl.plan.search.find import find_layouts
from mpctl.plan.search.nearest import nearest_that_fit
from mpctl.plan.search.request import read_request, varied
from mpctl.plan.search.space import SearchSpace
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.spec.presets import VARIABLE, find_file
from tests.plan.search.test_find import assert_equal_answers

JOB = {
    "cluster": "selene",
    "cluster.nodes": 2,
    "cluster.gpus_per_node": 8,
    "model.layers": 4,
    "model.hidden": 2048,
    "model.heads": 16,
    "model.vocab": 50257,
    "model.seq_length": 1024,
    "training.global_batch_size": 32,
    "training.dtype": "bf16",
    "training.runtime": "grids",
}
MODES = ["1d", "2d", "2.5d", "3d"]


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime like ours that runs every tensor mode, whatever ours does."""
    ours = find_file("runtimes", "mpctl")
    assert ours is not None
    lines = ours.path.read_text("utf-8").splitlines()
    own = [f"tensor_modes = {MODES}" if line[:12] == "tensor_modes" else line for line in lines]
    (tmp_path / "runtimes").mkdir()
    (tmp_path / "runtimes" / "grids.toml").write_text("\n".join(own), "utf-8")
    monkeypatch.setenv(VARIABLE, str(tmp_path))


def job_of(**settings: Any) -> JobSpec:
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return load_job(None, {**JOB, **named})


def grids_of(space: SearchSpace, tp: int) -> list[tuple[str, int | None]]:
    return [(grid.mode, grid.axes.get("depth")) for grid in space.grids(tp)]


def samples(space: SearchSpace, count: int) -> list[LayoutSettings]:
    """Layouts of every tensor mode, at random."""
    by_mode: dict[str, list[LayoutSettings]] = {}
    for layout in space.layouts():
        by_mode.setdefault(layout.tensor_mode, []).append(layout)
    draw = random.Random(5)
    return [one for own in by_mode.values() for one in draw.sample(own, min(count, len(own)))]


def test_the_grids_by_hand() -> None:
    space = SearchSpace(job_of())
    assert grids_of(space, 1) == [("1d", None)]
    assert grids_of(space, 4) == [("1d", None), ("2d", None)]
    assert grids_of(space, 8) == [("1d", None), ("2.5d", 2), ("3d", None)]
    assert grids_of(space, 16) == [("1d", None), ("2d", None)]
    many = SearchSpace(job_of(cluster__nodes=8, training__global_batch_size=64))
    assert grids_of(many, 64) == [("2d", None), ("2.5d", 4), ("3d", None)]


def test_a_grid_that_does_not_divide_the_model_is_not_tried() -> None:
    odd = SearchSpace(job_of(cluster__nodes=9, model__heads=15, model__hidden=1920))
    assert grids_of(odd, 4) == [] and grids_of(odd, 9) == [("2d", None)]


def test_every_mode_is_in_the_space_and_each_layout_is_legal() -> None:
    space = SearchSpace(job_of(), {"order": "tp-cp-dp-pp"})
    layouts = list(space.layouts())
    assert len(set(layouts)) == len(layouts)
    assert {(n.tensor_mode, n.tp) for n in layouts if n.tensor_mode != "1d"} == {("2d", 4), ("2.5d", 8), ("3d", 8)}
    assert {"tensor_mode", "tensor_depth"} <= set(varied(space))
    for layout in samples(space, 25):
        job = space.job_of(layout)
        assert [c for c in check_job(job) if c.status == "error"] == []
        assert layout_of(job) == layout


def test_a_runtime_of_1d_alone_is_not_asked_for_other_modes() -> None:
    layouts = SearchSpace(job_of(training__runtime="megatron-core")).layouts()
    assert {layout.tensor_mode for layout in layouts} == {"1d"}


@pytest.mark.parametrize(
    ("fixed", "found"),
    [
        (["tensor_mode=1d"], {("1d", 1, None), ("1d", 2, None), ("1d", 4, None), ("1d", 8, None)}),
        (["tensor_mode=2d"], {("2d", 4, None)}),
        (["tensor_mode=2.5d"], {("2.5d", 4, 1), ("2.5d", 8, 2)}),
        (["tensor_mode=2.5d", "parallel.tensor_depth=2"], {("2.5d", 8, 2)}),
        (["parallel.tensor_mode=3d", "tp=8"], {("3d", 8, None)}),
        (["tensor_mode=3d", "tp=4"], set()),
        (["tensor_mode=2d", "cp=2"], set()),
        (["tensor_mode=2d", "sequence_parallel=true"], set()),
    ],
)
def test_a_mode_is_fixed_like_any_setting(fixed: list[str], found: set[Any]) -> None:
    space = read_request(None, JOB, [*fixed, "order=tp-cp-dp-pp"], {}).space()
    assert {(n.tensor_mode, n.tp, n.tensor_depth) for n in space.layouts()} == found


def test_a_job_file_that_sets_a_mode_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[parallel]\ntensor_mode = "2.5d"\ntensor_depth = 2\n', "utf-8")
    kept = read_request(str(path), JOB, [], {})
    assert kept.fixed == {"tensor_mode": "2.5d", "tensor_depth": 2}
    assert {(n.tensor_mode, n.tp) for n in kept.space().layouts()} == {("2.5d", 8)}
    other = read_request(str(path), JOB, ["tensor_mode=2d"], {})
    assert {(n.tensor_mode, n.tp) for n in other.space().layouts()} == {("2d", 4)}


def test_a_search_knows_what_own_runs_found_of_layers() -> None:
    """Three times faster in one shape: below the bound of the others, and not of its own."""
    job = job_of(training__global_batch_size=64, cluster__step_factor=1.0)
    space = SearchSpace(job)
    evaluator, shape = LayoutEvaluator(space), layer_shape(job)
    profile = evaluator.profile
    found = {job.cluster.name or "": {shape: 1 / 3}}
    seen = profile.seen.model_copy(update={"layer_factors": found})
    evaluator.profile = profile.model_copy(update={"seen": seen})
    bounds, plain = StepTimeBound(evaluator), LayoutEvaluator(space)
    alike = [one for one in space.layouts() if layer_shape(space.job_of(one)) == shape]
    for layout in (*alike[:: len(alike) // 6 + 1], *samples(space, 6)):
        seconds, before = evaluator.step_seconds(layout), plain.step_seconds(layout)
        assert seconds is not None and before is not None
        assert (seconds < before) == (layer_shape(space.job_of(layout)) == shape)
        assert bounds.of_family(layout._replace(zero=0, order="")) <= seconds


def test_the_evaluator_gives_what_plan_gives_and_bounds_are_below() -> None:
    space = SearchSpace(job_of(training__global_batch_size=64))
    evaluator = LayoutEvaluator(space)
    bounds = StepTimeBound(evaluator)
    for layout in samples(space, 12):
        estimate, time = make_plan(space.job_of(layout)).estimate, evaluator.step_time(layout)
        assert estimate is not None and time is not None
        assert time == estimate.time
        assert evaluator.device_bytes(layout) == peak_bytes(estimate.memory)
        assert evaluator.min_state_bytes <= evaluator.min_bytes(layout, layout.zero)
        assert evaluator.min_bytes(layout, layout.zero) <= evaluator.device_bytes(layout)
        family = layout._replace(zero=0, order="")
        bound = bounds.of_family(family)
        (own,) = [b for b, found in bounds.of_members(family, bound, [layout]) if found == layout]
        assert 0 < bounds.of_axes_quickly(layout) <= bounds.of_axes(layout) <= bound
        assert bound <= own <= time.total


@pytest.mark.parametrize("objective", ["tokens", "memory"])
def test_the_pruned_search_finds_what_the_exhaustive_one_does(objective: Any) -> None:
    fixed = {"cp": 1, "tp": 4, "order": "tp-cp-dp-pp", "stage_balance": "even", "zero": 1}
    space = SearchSpace(job_of(cluster__nodes=1), fixed)
    pruned, every = (find_layouts(space, top=400, exhaustive=way, objective=objective) for way in (False, True))
    assert_equal_answers(space, pruned, every, objective)
    assert {point.layout.tensor_mode for point in every.best} == {"1d", "2d"}


def test_a_mode_is_a_change_with_a_name() -> None:
    here = layout_of(job_of(parallel__tp=8))
    there = layout_of(job_of(parallel__tp=8, parallel__tensor_mode="2.5d"))
    assert changed_settings(here, there) == {"parallel.tensor_mode": "2.5d", "parallel.tensor_depth": 2}
    back = changed_settings(there, here)
    assert back == {"parallel.tensor_mode": "1d", "parallel.tensor_depth": None}
    assert [setting_text(*change) for change in back.items()] == ["tensor mode 1d", "no tensor depth"]
    assert layout_text(there).startswith("tp 8 (2.5d, depth 2) dp 2")


def test_nearest_layouts_name_the_mode_that_fits() -> None:
    """Of the layouts with everything but tp and its mode as they are."""
    job = job_of(
        cluster__device__memory_bytes=9 * 2**30,
        parallel__tp=4,
        parallel__dp=4,
        parallel__tensor_mode="2d",
        training__micro_batch_size=8,
    )
    nearest = nearest_that_fit(job)
    assert nearest
    for near in nearest:
        there = load_job(None, {**named(job), **near.changes})
        plan = make_plan(there)
        assert plan.fits and plan.estimate is not None
        assert plan.estimate.step_seconds == near.step_seconds


def named(job: JobSpec) -> dict[str, Any]:
    p, t = job.parallel, job.training
    memory = job.cluster.device.memory_bytes if job.cluster.device else None
    return {
        **JOB,
        "parallel.tp": p.tp,
        "parallel.tensor_mode": p.tensor_mode,
        "training.micro_batch_size": t.micro_batch_size,
        "cluster.device.memory_bytes": memory,
    }
