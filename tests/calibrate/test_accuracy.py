"""The estimate of step time against published runs: today's accuracy, held with a small margin.

`python -m benchmarks.accuracy` prints the whole table. A constant that is fitted must stand in a
preset of a device, a cluster or a runtime, and nothing there may know a model or a row.
"""

from __future__ import annotations

import json
import tomllib
from math import log
from statistics import mean
from typing import Any

import pytest

from benchmarks.accuracy import (
    GATES,
    by_table,
    published_runs,
    regret,
    spearman,
    speeds,
    sweeps,
)
from mpctl.calibrate.cross import Residuals, residuals
from mpctl.calibrate.runs import constants_of
from mpctl.spec.job import complete
from mpctl.spec.presets import presets_root

# Mean absolute error of a step in percent, a little above what `accuracy` prints; never a gate.
TODAY = {
    "Selene": 2.2, "B200": 4.6, "Jean Zay": 5.0, "vTrain, several nodes": 6.2, "zero bubble": 4.4,
    "MosaicML": 4.6, "torchtitan": 5.2, "vTrain, one node": 7.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def off() -> Residuals:
    return residuals(published_runs(), {})


def test_every_published_run_is_estimated(off: Residuals) -> None:
    assert len(off) == len(published_runs()) == 209


@pytest.mark.parametrize("table", GATES)
def test_step_seconds(table: str, off: Residuals) -> None:
    error = 100 * mean(map(abs, by_table(off)[table]))
    assert error <= TODAY[table]
    assert TODAY[table] <= GATES[table]


def test_nine_of_ten_steps_lie_within_their_band(off: Residuals) -> None:
    inside = []
    for run in published_runs():
        if "step_seconds" in run.measured:
            time = run.estimate()
            assert time.extrapolates == (), run.id
            inside.append(abs(off[run.id][0]) <= log(time.high / time.total))
    assert 0.82 < mean(inside) < 0.97


def test_layouts_are_ranked_as_they_ran(off: Residuals) -> None:
    """Over all sweeps together; of the largest the planner's choice costs a few percent."""
    ranks = {name: (spearman(speeds(runs, off)), regret(speeds(runs, off)))
             for name, runs in sweeps()}  # fmt: skip
    assert len(ranks) > 5
    assert mean(rank for rank, _ in ranks.values()) > 0.8
    assert mean(loss for _, loss in ranks.values()) < 0.02


def test_no_constant_is_keyed_by_a_model_or_a_row() -> None:
    """What a fit may move are presets of devices, clusters and runtimes; and no text in them names
    a model, a hidden size or a run of the tables."""
    runs = published_runs()
    assert {c.kind for c in constants_of(runs)} == {"devices", "clusters", "runtimes"}
    ids = {run.id for run in runs}
    for kind in ("devices", "clusters", "runtimes"):
        for path in (presets_root() / kind).glob("*.toml"):
            table = tomllib.loads(path.read_text("utf-8"))
            keys = set(_keys(table))
            assert not keys & {"model", "layers", "hidden_size", "rows", "id", "overrides"}, path
            assert not ids & set(json.dumps(table).split('"')), path


def _keys(table: dict[str, Any]) -> list[str]:
    return [k for key, value in table.items()
            for k in (key, *(_keys(value) if isinstance(value, dict) else ()))]  # fmt: skip


def test_estimates_know_nothing_of_names(off: Residuals) -> None:
    """The same layout of a model by another name, in a job by another, takes as long."""
    for run in published_runs()[::20]:
        assert run.job.model is not None
        model = run.job.model.model_copy(update={"name": "another"})
        job = run.job.model_copy(update={"name": "another", "model": model})
        assert run.estimate(job).total == run.estimate().total


def test_others_layouts_are_cut_as_they_ran() -> None:
    """Zero bubble's 22 layers on 8 stages: embedding and loss count as layers, 24 are 3 a stage."""
    run = next(run for run in published_runs() if run.id == "zb_1.5B_1F1B_m24")
    assert [stop - start for ((start, stop),) in run.layout.stages] == [2, 3, 3, 3, 3, 3, 3, 2]
    ours = run.job.training.model_copy(update={"runtime": "mpctl"})
    plain = {"embedding_is_layer": False, "loss_is_layer": False}
    parallel = run.job.parallel.model_copy(update=plain)
    job = complete(run.job.model_copy(update={"training": ours, "parallel": parallel}))
    assert not job.parallel.embedding_is_layer
