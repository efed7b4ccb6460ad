"""Own runs: figures that were changed are found, as surely as stated, and written; words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from itertools import chain
from math import exp, log
from operator import le
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.measure.calibrate.own import band_spread, fit_own, own_presets
from mpctl.measure.calibrate.own_fit import FreeFigure, OwnFit
from mpctl.measure.calibrate.own_words import WrittenPresets, own_document
from mpctl.measure.calibrate.repeats import find_repeats
from mpctl.measure.calibrate.runs import Constant, Run, read_runs
from mpctl.plan.estimate.system import layer_shape
from mpctl.spec.cluster import ClusterSpec
from mpctl.spec.presets import VARIABLE
from mpctl.spec.runtime import RuntimeProfile, get_profile
from tests.finetuning import finetuning_rows
from tests.own_sweeps import SWEEPS, draw, held_out_values, read_sweep
from tests.published import published_rows

FACTOR = Constant("clusters", "dgx-a100", "step_factor", 0.13)
HOST = Constant("runtimes", "megatron-core", "host.layer", 0.5)
LAYERS_OF = Constant("runtimes", "megatron-core", "seen.layer_factors", 0.06)
LINK = Constant("clusters", "dgx-a100", "intra_node.efficiency", 0.25, most=1.0)


def rows_elsewhere(every: int = 8) -> list[dict[str, Any]]:
    """vTrain's jobs as those of another software on another cluster, which no preset has seen
    together."""
    rows = []
    for row in published_rows():
        if str(row["group"]).startswith("vtrain"):
            job = {**row["job"], "cluster": {**row["job"]["cluster"], "preset": "dgx-a100"}}
            job["training"] = {**job["training"], "runtime": "megatron-core"}
            rows.append({**row, "job": job})
    return rows[::every]


def like_measured(runs: list[Run], values: dict[Constant, float]) -> list[Run]:
    """Runs that took the times estimated under these figures, and 2 % more or less in turn."""
    found = []
    for at, run in enumerate(runs):
        seconds = exp(run.residuals(values)[0] + (-1) ** at * 0.02) * run.measured["step_seconds"]
        found.append(replace(run, measured={"step_seconds": seconds}))
    return found


TRUTH = {FACTOR: 1.35, HOST: 0.0009, LINK: 0.6}


@pytest.fixture(scope="module")
def sweep() -> list[Run]:
    return like_measured(read_runs(rows_elsewhere()), TRUTH)


@pytest.fixture(scope="module")
def fit(sweep: list[Run]) -> OwnFit:
    return fit_own(sweep[::3])


def figure_of(fit: OwnFit, constant: Constant) -> tuple[FreeFigure, float, float]:
    """A figure, its shift and the standard deviation of that."""
    at = next(i for i, f in enumerate(fit.figures) if f.constant.key == constant.key)
    return fit.figures[at], fit.posterior.shifts[at], fit.posterior.covariance[at][at] ** 0.5


@pytest.mark.slow
def test_runs_to_come_are_where_the_posterior_says(fit: OwnFit, sweep: list[Run]) -> None:
    rest = [run for at, run in enumerate(sweep) if at % 3]
    assert len(fit.runs) == 6 and len(rest) == 11
    misses = []
    for run in rest:
        seconds, spread = fit.predict(run)
        misses.append(abs(log(seconds / run.measured["step_seconds"])) / spread)
    assert sum(miss <= 1.645 for miss in misses) >= 0.85 * len(misses)
    off = [abs(log(fit.predict(run).seconds / run.measured["step_seconds"])) for run in rest]
    assert sum(off) / len(off) < 0.06
    before = [abs(run.residuals({FACTOR: 1.12})[0]) for run in rest]
    assert sum(before) / len(before) > 0.25


@pytest.mark.parametrize(("constant", "most"), [(FACTOR, 0.7), (HOST, 0.9), (LINK, 1.01)])
def test_figures_are_found_as_surely_as_stated(fit: OwnFit, constant: Constant, most: float) -> None:
    """most: of a standard deviation; few runs here send much over tp."""
    figure, shift, sure = figure_of(fit, constant)
    assert abs(shift - figure.shift(TRUTH[constant])) <= 2 * sure
    assert sure < most


def test_what_no_run_depends_on_stays_unknown(sweep: list[Run]) -> None:
    one_node = [run for run in sweep if run.job.world_size <= 8 and run.job.parallel.pp == 1][:5]
    fit = fit_own(one_node)
    figure, shift, sure = figure_of(fit, replace(LINK, path="inter_node.efficiency"))
    assert shift == 0 and sure == pytest.approx(1.0) and figure.value(shift) == figure.start
    assert fit.learnt[-1] == "5 runs say nothing of pipelines or several nodes"
    assert fit.telling[0] == "a run with parallel.pp above 1: nothing is known of pipelines here"


def test_what_was_learnt_is_said_in_words(fit: OwnFit) -> None:
    factor = fit.learnt[0]
    assert factor.startswith("dgx-a100: everything takes ") and "% longer than the presets" in factor
    assert any(line.startswith("figures of a100-80gb and megatron-core moved: ") for line in fit.learnt)
    host = next(line for line in fit.learnt if "for a layer's forward" in line)
    assert "before: 401 µs; steps +" in host
    document = own_document(fit, WrittenPresets(Path("x"), [Path("x")], None), [], [])
    row = next(row for row in document["figures"] if row["key"] == "host.layer")
    assert row["low"] < row["value"] < row["high"] and row["preset"] == "runtimes/megatron-core"
    errors = document["errors"]
    assert max(map(abs, errors["fitted"].values())) < max(map(abs, errors["before"].values()))
    assert json.loads(json.dumps(document)) == document


def test_one_run_moves_little_but_the_factor(sweep: list[Run]) -> None:
    fit = fit_own(sweep[:1])
    assert set(fit.left_out) == {sweep[0].id}
    figure, shift, _ = figure_of(fit, FACTOR)
    assert figure.value(shift) > 1.13
    assert fit.spread > 0.06


def test_an_odd_run_pulls_no_harder_than_others(sweep: list[Run]) -> None:
    runs = sweep[::3]
    odd = replace(runs[0], measured={"step_seconds": 6 * runs[0].measured["step_seconds"]})
    fit = fit_own([odd, *runs[1:]])
    figure, shift, _ = figure_of(fit, FACTOR)
    assert figure.value(shift) == pytest.approx(1.35, rel=0.12)
    (doubt,) = fit.doubts
    assert doubt.startswith(f"{odd.id} took ") and doubt.endswith("says, and hardly counts")
    assert 4 < float(doubt.removeprefix(f"{odd.id} took ").split()[0]) < 9


def times(run: Run, *factors: float) -> list[Run]:
    """Repeats of a run that took so many times as long."""
    seconds = run.measured["step_seconds"]
    return [
        replace(run, id=f"{run.id}, {n}", measured={"step_seconds": factor * seconds})
        for n, factor in enumerate(factors)
    ]


def layer_factors(fit: OwnFit) -> dict[str, float]:
    return {c.layers[1]: value for c, value in fit.values.items() if c.layers}


def test_layouts_share_what_layers_of_their_shape_take(sweep: list[Run]) -> None:
    """Layers of one shape take 15 % longer: three runs tell it of a fourth."""
    tp2 = [row for row in published_rows() if row["job"]["parallel"]["tp"] == 2]
    single = next(row["id"] for row in tp2 if row["group"] == "vtrain_single")
    row = next(row for row in rows_elsewhere(1) if row["id"] == single)
    rows = []
    for pp, batch in ((1, 16), (1, 32), (2, 16), (2, 32)):
        job = json.loads(json.dumps(row["job"]))
        job["parallel"] |= {"pp": pp, "dp": None}
        job["training"] |= {"micro_batch_size": 2, "global_batch_size": batch}
        rows.append({**row, "id": f"{pp} {batch}", "job": job})
    alike = read_runs(rows)
    (shape,) = {layer_shape(run.job) for run in alike}
    assert shape == "2 x 1024 x 1024, tp 2, recompute full, fp16"
    slow = replace(LAYERS_OF, layers=alike[0].layers)
    alike = like_measured(alike, {**TRUTH, slow: 1.15})
    fit = fit_own([*alike[:3], *sweep])
    factors = layer_factors(fit)
    assert factors.pop(shape) > 1.025 > max(factors.values())
    said = f"to {layer_factors(fit)[shape]:.2f} times ({shape}) as long"
    assert any(line.endswith(said) for line in fit.learnt)
    assert abs(log(fit.predict(alike[3]).seconds / alike[3].measured["step_seconds"])) < 0.08


def test_repeats_of_a_job_are_one_run(sweep: list[Run]) -> None:
    once, five = fit_own(sweep[:1]), fit_own(times(sweep[0], 1, 1, 1, 1, 1))
    assert five.posterior == once.posterior and five.spreads == once.spreads
    assert len(five.left_out) == 5 and not five.doubts
    seeded = sweep[0].job.training.model_copy(update={"seed": 5})
    job = sweep[0].job.model_copy(update={"training": seeded})
    other = replace(sweep[0], layout=replace(sweep[0].layout, job=job))
    assert len(find_repeats([sweep[0], other])) == 1 and len(find_repeats(sweep)) == len(sweep)


@pytest.mark.slow
def test_repeats_that_scatter_widen_the_band_and_contradictions_are_told(sweep: list[Run]) -> None:
    fits = [fit_own([*times(sweep[0], 1 / off, 1, off), *sweep[3::3]]) for off in (1, 1.1, 1.4)]
    spreads = [fit.spread for fit in fits]
    assert spreads == sorted(spreads) and spreads[2] > 1.1 * spreads[0]
    assert fits[0].posterior.shifts == pytest.approx(fits[2].posterior.shifts)
    name = sweep[0].id
    off = {run: error for run, (error,) in fits[2].fitted.items() if run.startswith(name)}
    assert off[f"{name}, 0"] - off[f"{name}, 1"] == pytest.approx(log(1.4))
    assert not fits[0].doubts and not fits[1].doubts
    (doubt,) = fits[2].doubts
    assert doubt.startswith(f"{name}, 0 and {name}, 2 are the same job and took ")


def test_a_system_three_times_as_slow_is_one_factor(sweep: list[Run]) -> None:
    runs = [replace(run, measured={"step_seconds": 3 * run.measured["step_seconds"]}) for run in sweep[::4]]
    fit = fit_own(runs)
    figure, shift, _ = figure_of(fit, FACTOR)
    assert figure.value(shift) == pytest.approx(3 * 1.35, rel=0.1) and fit.posterior.noise < 0.08


def test_written_presets_plan_what_the_fit_predicts(fit: OwnFit, sweep: list[Run], tmp_path: Path) -> None:
    paths = own_presets(fit, tmp_path)
    names = {path.relative_to(tmp_path).as_posix(): path for path in paths}
    assert set(names) == {"clusters/dgx-a100.toml", "devices/a100-80gb.toml", "runtimes/megatron-core.toml"}
    cluster = tomllib.loads(names["clusters/dgx-a100.toml"].read_text()) | {"device": None}
    assert ClusterSpec.model_validate(cluster).step_factor == pytest.approx(
        fit.values[figure_of(fit, FACTOR)[0].constant], rel=1e-3
    )
    table = tomllib.loads(names["runtimes/megatron-core.toml"].read_text())
    seen = RuntimeProfile.model_validate(table).seen
    assert seen.clusters == ["DGX A100 SuperPOD, one scalable unit"]
    assert tuple(seen.links[seen.clusters[0]]) == (300e9, 200e9)
    assert seen.step_factors == {seen.clusters[0]: cluster["step_factor"]}
    unseen = next(run for run in sweep if run.job.world_size == 8 and run not in fit.runs)
    planned = [unseen, fit.runs[0]]
    jobs = {row["id"]: row["job"] for row in rows_elsewhere()}
    lines = "\n".join(json.dumps(jobs[run.id]) for run in planned)
    (tmp_path / "jobs.jsonl").write_text(lines + "\n")
    line = [sys.executable, "-m", "mpctl", "plan", "--batch", str(tmp_path / "jobs.jsonl")]
    own = {**os.environ, "MPCTL_PRESETS": str(tmp_path)}
    said = subprocess.run(line, env=own, capture_output=True, check=True, text=True).stdout
    for run, plan in zip(planned, map(json.loads, said.splitlines()), strict=True):
        assert plan["step_seconds"] == pytest.approx(fit.predict(run).seconds, rel=2e-3)
        reach = log(plan["step_seconds_high"] / plan["step_seconds"]) / 1.645
        assert reach == pytest.approx(fit.spread, rel=1e-3)
    assert seen.layer_factors[seen.clusters[0]][layer_shape(fit.runs[0].job)] == pytest.approx(
        layer_factors(fit)[layer_shape(fit.runs[0].job)], rel=1e-3
    )


def test_systems_in_one_call_have_a_factor_each(sweep: list[Run]) -> None:
    rows = [
        {**row, "job": {**row["job"], "cluster": {**row["job"]["cluster"], "preset": "selene"}}}
        for row in rows_elsewhere()[::5]
    ]
    other = like_measured(read_runs(rows), {replace(FACTOR, name="selene"): 0.9, HOST: 0.0009})
    other = [replace(run, id=f"{run.id}, Selene") for run in other]
    fit = fit_own([*sweep[::5], *other])
    slow, shift, _ = figure_of(fit, FACTOR)
    fast, less, _ = figure_of(fit, replace(FACTOR, name="selene"))
    assert slow.value(shift) > 1.2 > 1.0 > fast.value(less)
    host = [figure for figure in fit.figures if figure.path == "host.layer"]
    assert len(host) == 1


def test_a_spread_rests_on_what_systems_are_like_and_then_on_the_runs() -> None:
    assert band_spread([(0.0, 1.0)], 0.0, 0.0) == 0.02
    small, large = (band_spread([(0.3, 1.0)] * n, 0.0, 0.05) for n in (5, 80))
    assert 0.05 < small < large < 0.3 / 1.645


def test_no_run_is_no_fit() -> None:
    with pytest.raises(ValueError, match="needs a run"):
        fit_own([])


@pytest.mark.slow  # two minutes: the presets are fitted without the sweep first
@pytest.mark.timeout(1200)
def test_few_own_runs_tell_the_rest_of_a_sweep() -> None:
    """vTrain's runs as those of another software on another cluster, by presets that have not seen
    them: benchmarks/results/measurements.md has the table of all sweeps."""
    name = "vtrain as megatron-core"
    ((_, values),) = held_out_values([name])
    runs = read_sweep(SWEEPS[name], values)
    draws = {size: [draw(runs, size, seed) for seed in range(3)] for size in (5, 20, 40)}
    errors = [fmean(score.error for score in own) for own in draws.values()]
    assert errors == sorted(errors, reverse=True)
    assert all(map(le, errors, (0.13, 0.085, 0.06)))
    for own in draws.values():
        assert 0.75 < fmean(score.inside for score in own) < 0.98
        assert fmean(chain.from_iterable(score.regrets for score in own)) < 0.06
        assert all(score.seconds < 20 for score in own)


def test_runs_with_adapters_change_the_figures_of_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are planned and fitted under with_adapters, which the written profile has; its other figures stay."""
    rows = [row for row in finetuning_rows() if row["id"].startswith("qwen_readme_7B_lora_1gpu")]
    runs = read_runs(rows)
    fit = fit_own([run for _ in range(2) for run in like_measured(runs, {replace(FACTOR): 1.5})])
    own_presets(fit, tmp_path)
    before, text = get_profile("other"), (tmp_path / "runtimes" / "other.toml").read_text("utf-8")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    after, tuned = get_profile("other"), get_profile("other", adapters=True)
    assert after.seen == before.seen and after.spread == before.spread and after.operators == before.operators
    assert "DGX A100 SuperPOD, one scalable unit" in tuned.seen.clusters and "[with_adapters.seen]" in text
    again = read_runs(rows)[0]
    assert again.profile == tuned
    found, wanted = (exp(run.residuals({})[0]) for run in (again, runs[0]))
    assert 1.2 < found / wanted < 1.6


def test_runs_with_and_without_adapters_are_calibrated_apart(tmp_path: Path) -> None:
    rows = [row for row in finetuning_rows() if row["id"].startswith("qwen_readme_1.8B")]
    with pytest.raises(InputError, match="apart"):
        own_presets(fit_own(read_runs(rows)), tmp_path)
