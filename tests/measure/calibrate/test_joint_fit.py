"""Constants that were changed are found again."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from math import exp
from pathlib import Path

import pytest

from mpctl.core.errors import InputError
from mpctl.measure.calibrate.runs import Constant, Run, read_runs
from mpctl.spec.cluster import ClusterSpec, DeviceSpec
from mpctl.spec.presets import find_preset
from mpctl.spec.runtime import RuntimeProfile
from tests.bands import write_presets
from tests.joint_fit import LeftOut, constants_of, get_prior, open_fit
from tests.published import published_runs

SLOWDOWN = Constant("clusters", "vtrain-a100", "slowdown", 1.0)
LAYER = Constant("runtimes", "megatron-deepspeed", "host.layer", 1.0)


def start_of(runs: list[Run], constants: list[Constant]) -> dict[Constant, float]:
    first = {c: next(run for run in runs if run.has(c)) for c in constants}
    return {c: get_prior(run.model(c.kind), c, {}) for c, run in first.items()}


def fitted(runs: list[Run], constants: list[Constant], processes: int = 1) -> dict[Constant, float]:
    with open_fit(runs, constants, {}, processes) as fit:
        return fit.values(fit.solve().shift)


def like_measured(runs: list[Run], values: dict[Constant, float]) -> list[Run]:
    """Runs that took the times estimated under these constants."""
    times = [exp(*run.residuals(values)) * run.measured["step_seconds"] for run in runs]
    return [replace(run, measured={"step_seconds": seconds}) for run, seconds in zip(runs, times, strict=True)]


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    """Small models that wait for their host, large ones that do not."""
    own = [run for run in published_runs() if run.parts["clusters"] == "vtrain-a100"]
    return own[:16:2] + own[20:60:5]


def test_a_fit_finds_the_constants_behind_the_runs(runs: list[Run]) -> None:
    start = start_of(runs, [SLOWDOWN, LAYER])
    truth = {SLOWDOWN: start[SLOWDOWN] * 1.2, LAYER: start[LAYER] * 0.7}
    values = fitted(like_measured(runs, truth), [SLOWDOWN, LAYER])
    assert values[SLOWDOWN] == pytest.approx(truth[SLOWDOWN], rel=0.02)
    assert values[LAYER] == pytest.approx(truth[LAYER], rel=0.03)


def test_an_odd_run_pulls_no_harder_than_any_other(runs: list[Run]) -> None:
    exact = like_measured(runs[:8], {})
    odd = replace(exact[0], measured={"step_seconds": 5 * exact[0].measured["step_seconds"]})
    values = fitted([odd, *exact[1:]], [SLOWDOWN])
    assert values[SLOWDOWN] == pytest.approx(start_of(exact, [SLOWDOWN])[SLOWDOWN], rel=0.02)


def test_a_prior_limits_the_effect_of_few_runs(runs: list[Run]) -> None:
    stiff = replace(SLOWDOWN, slack=0.001)
    start = start_of(runs, [SLOWDOWN])[SLOWDOWN]
    slow = like_measured(runs[:3], {SLOWDOWN: start * 1.5})
    assert fitted(slow, [stiff])[stiff] == pytest.approx(start, rel=0.01)
    assert fitted(slow, [SLOWDOWN])[SLOWDOWN] == pytest.approx(start * 1.5, rel=0.05)


def test_runs_left_out_tell_a_fit_nothing(runs: list[Run]) -> None:
    """A fit that goes on from one to all runs ends where one without them ends; a constant that
    only they told, here of a runtime that only they name, is back at its prior."""
    constants = [SLOWDOWN, LAYER]
    slow = like_measured(runs[:6], {SLOWDOWN: 1.3})
    mixed = [*(replace(run, parts={**run.parts, "runtimes": "mpctl"}) for run in slow), *runs[6:]]
    with open_fit(mixed, constants, {}, 1) as fit:
        others = fit.without(range(6, len(mixed)))
        state = others.solve(begin=fit.solve())
    assert state.shift[1] == 0
    alone = fitted(slow, [SLOWDOWN])[SLOWDOWN]
    assert fit.values(state.shift)[SLOWDOWN] == pytest.approx(alone, rel=0.01)


def test_two_processes_find_what_one_finds(runs: list[Run]) -> None:
    constants = [SLOWDOWN, LAYER]
    assert fitted(runs, constants, 2) == fitted(runs, constants, 1)


def test_the_first_cluster_of_a_device_is_never_slower_than_it() -> None:
    paths = {(c.name, c.path) for c in constants_of(published_runs())}
    assert ("jean-zay", "slowdown") in paths
    assert ("selene", "slowdown") not in paths


def test_written_presets_are_legal_and_hold_the_values(runs: list[Run], tmp_path: Path) -> None:
    constants = constants_of(runs)
    values = {c: value * 0.99 for c, value in start_of(runs, constants).items()}
    off = LeftOut({run.id: [0.1] for run in runs}, {}, {})
    paths = write_presets(runs, values, tmp_path, off)
    tables = {p.relative_to(tmp_path).as_posix(): tomllib.loads(p.read_text()) for p in paths}
    assert set(tables) == {
        "devices/a100-80gb.toml",
        "devices/a100-40gb.toml",
        "clusters/vtrain-a100.toml",
        "runtimes/megatron-deepspeed.toml",
    }
    profile = RuntimeProfile.model_validate(tables["runtimes/megatron-deepspeed.toml"])
    assert profile.host.layer == pytest.approx(values[replace(LAYER, slack=0.4)], rel=1e-3)
    assert profile.spread == pytest.approx(0.1 / 1.645, rel=1e-3)
    device = DeviceSpec.model_validate(tables["devices/a100-40gb.toml"])
    assert device.kernels is not None
    products = Constant("devices", "a100-80gb", "kernels.products", 0.1, ("a100-40gb",), 0.95)
    assert device.kernels.products == pytest.approx(values[products], rel=1e-3)
    cluster = tables["clusters/vtrain-a100.toml"] | {"device": None}
    assert ClusterSpec.model_validate(cluster).source == (find_preset("clusters", "vtrain-a100") or {})["source"]


@pytest.mark.parametrize("measured", [{}, {"layer_forward_ms": 1.0}, {"mfu": 0.4}])
def test_a_run_without_a_measured_time_is_refused(measured: dict[str, float]) -> None:
    row = {"id": "odd", "job": {"cluster": {"preset": "selene"}}, "measured": measured}
    with pytest.raises(InputError, match=r"measured\.step_seconds, or measured\.layer_forward_ms"):
        read_runs([row])
