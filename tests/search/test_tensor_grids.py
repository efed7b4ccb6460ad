"""Tensor modes in the search: which grids are tried, and that bounds and figures hold for them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from mpctl.planning.layout_settings import (
    LayoutSettings,
    changed_settings,
    layout_of,
    layout_text,
)
from mpctl.rules.validate import check_job
from mpctl.search.request import read_request, varied
from mpctl.search.space import SearchSpace
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.spec.presets import VARIABLE, find_file

JOB = {
    "cluster": "selene", "cluster.nodes": 2, "cluster.gpus_per_node": 8,
    "model.layers": 4, "model.hidden": 2048, "model.heads": 16, "model.vocab": 50257,
    "model.seq_length": 1024, "training.global_batch_size": 32, "training.dtype": "bf16",
    "training.runtime": "grids",
}  # fmt: skip
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
    return [(grid.mode, grid.axes.get("depth")) for grid in space.grids.of(tp)]


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


def test_every_mode_is_in_the_space_and_each_layout_is_legal() -> None:
    space = SearchSpace(job_of(), {"order": "tp-cp-dp-pp"})
    layouts = list(space.layouts())
    assert len(set(layouts)) == len(layouts)
    assert {(n.tensor_mode, n.tp) for n in layouts if n.tensor_mode != "1d"} == {
        ("2d", 4), ("2.5d", 8), ("3d", 8),
    }  # fmt: skip
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


def test_a_mode_is_a_change_with_a_name() -> None:
    here = layout_of(job_of(parallel__tp=8))
    there = layout_of(job_of(parallel__tp=8, parallel__tensor_mode="2.5d"))
    assert changed_settings(here, there) == {
        "parallel.tensor_mode": "2.5d", "parallel.tensor_depth": 2,
    }  # fmt: skip
    assert changed_settings(there, here) == {"parallel.tensor_mode": "1d"}
    assert layout_text(there).startswith("tp 8 (2.5d, depth 2) dp 2")
