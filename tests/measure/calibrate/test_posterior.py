"""Shifts that were put in are found, as surely as stated; runs left out are what a fit without them
says."""

from __future__ import annotations

import random
from math import sqrt
from operator import mul

import pytest

from mpctl.measure.calibrate.posterior import NU, PRIOR_NOISE, STUDENT, Posterior, find_posterior

UNBOUNDED = 99.0
SLOPES = [[0.13, 0.02 * k, 0.05 * (k % 2)] for k in range(12)]


def posterior_of(residuals: list[float], slopes: list[list[float]] = SLOPES) -> Posterior:
    size = len(slopes[0])
    return find_posterior(residuals, slopes, [-UNBOUNDED] * size, [UNBOUNDED] * size)


def drawn(seed: int, runs: int) -> tuple[list[float], list[float]]:
    """True shifts drawn from their prior, and the residuals of runs that they and noise left."""
    draw = random.Random(seed)
    shifts = [draw.gauss(0, 1) for _ in SLOPES[0]]
    noise = (PRIOR_NOISE * draw.gauss(0, 1) / sqrt(draw.gammavariate(NU / 2, 2 / NU)) for _ in SLOPES[:runs])
    rows = zip(noise, SLOPES[:runs], strict=True)
    return shifts, [off - sum(map(mul, row, shifts)) for off, row in rows]


@pytest.mark.parametrize("runs", [4, 12])
def test_nine_of_ten_shifts_and_runs_to_come_are_within_their_bounds(runs: int) -> None:
    inside_shifts, inside_runs = [], []
    for seed in range(120):
        shifts, residuals = drawn(seed, runs)
        found = posterior_of(residuals[:-1], SLOPES[: runs - 1])
        for i, true in enumerate(shifts):
            reach = 1.645 * sqrt(found.covariance[i][i])
            inside_shifts.append(abs(found.shifts[i] - true) <= reach)
        row = SLOPES[runs - 1]
        off = residuals[-1] + sum(map(mul, row, found.shifts))
        reach = sqrt(1.645**2 * found.variance(row) + (STUDENT * found.noise) ** 2)
        inside_runs.append(abs(off) <= reach)
    assert 0.85 < sum(inside_shifts) / len(inside_shifts) < 0.97
    assert 0.85 < sum(inside_runs) / len(inside_runs) < 0.98


def test_more_runs_tell_more() -> None:
    _, residuals = drawn(1, 12)
    few, many = posterior_of(residuals[:4], SLOPES[:4]), posterior_of(residuals)
    assert all(many.covariance[i][i] < few.covariance[i][i] < 1 for i in range(3))


def test_an_odd_run_counts_for_little() -> None:
    calm = posterior_of([-0.1] * 12)
    odd = posterior_of([*[-0.1] * 11, 1.6])
    assert odd.weights[-1] < 0.1 < 1 < odd.weights[0]
    assert odd.shifts[0] == pytest.approx(calm.shifts[0], abs=0.15)


def test_a_run_left_out_is_what_the_others_say() -> None:
    _, residuals = drawn(3, 12)
    found = posterior_of(residuals)
    for at in (0, 5, 11):  # weights are those of all runs
        others = posterior_of(residuals[:at] + residuals[at + 1 :], SLOPES[:at] + SLOPES[at + 1 :])
        off = residuals[at] + sum(map(mul, SLOPES[at], others.shifts))
        assert found.left_out[at] == pytest.approx(off, abs=0.02)


def test_a_shift_stays_within_its_bounds_and_the_others_make_up_for_it() -> None:
    slopes = [[0.1, 0.1]] * 9
    free = posterior_of([-0.2] * 9, slopes)
    held = find_posterior([-0.2] * 9, slopes, [-9.0, -9.0], [0.3, 9.0])
    assert free.shifts[0] > 0.8 and held.shifts[0] == 0.3
    assert held.shifts[1] > free.shifts[1] + 0.3


def test_a_shift_that_no_run_depends_on_keeps_its_prior() -> None:
    found = posterior_of([0.1] * 5, [[0.1, 0.0]] * 5)
    assert found.shifts[1] == 0 and found.covariance[1][1] == pytest.approx(1)


def test_a_shift_that_may_be_large_is_not_shared_out_to_others() -> None:
    slopes = [[0.13, 0.1 * (k % 2), 0.1] for k in range(5)]
    near = posterior_of([1.3] * 5, slopes)
    far = find_posterior([1.3] * 5, slopes, [-UNBOUNDED] * 3, [UNBOUNDED] * 3, [0])
    assert far.shifts[0] == pytest.approx(-10, abs=0.8)
    assert near.shifts[0] > -7 and near.noise > far.noise
