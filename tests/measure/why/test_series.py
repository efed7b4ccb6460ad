"""The shape of step times: noise, warm-up, spikes, levels, drift."""

from __future__ import annotations

from random import Random

import pytest

from mpctl.measure.why.series import Point, Shape, find_shape


def shape_of(seconds: list[float], interval: int = 1) -> Shape:
    return find_shape([Point(n * interval, s) for n, s in enumerate(seconds, 1)])


def noisy(noise: float, seed: int, lines: int = 200) -> list[float]:
    random = Random(seed)
    return [1 + random.gauss(0, noise) for _ in range(lines)]


@pytest.mark.parametrize("noise", [0.001, 0.01, 0.03])
@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_has_no_form(noise: float, seed: int) -> None:
    shape = shape_of([3.0, *noisy(noise, seed)])
    assert len(shape.levels) == 1
    assert shape.drift is None
    assert not shape.spikes
    assert shape.base == pytest.approx(1, rel=0.01)
    assert shape.noise == pytest.approx(max(noise, 0.002), rel=0.35)


@pytest.mark.parametrize("lasting", [0.5, 0.8])
@pytest.mark.parametrize("seed", range(20))
def test_slow_spells_are_no_levels(lasting: float, seed: int) -> None:
    random, state, seconds = Random(seed), 0.0, list[float]()
    for _ in range(200):
        state = lasting * state + random.gauss(0, 0.02 * (1 - lasting**2) ** 0.5)
        seconds.append(1 + state)
    shape = shape_of([3.0, *seconds])
    assert len(shape.levels) == 1 and shape.drift is None
    assert len(shape_of([3.0, *(s * (1.15 if n > 120 else 1) for n, s in enumerate(seconds))]).levels) == 2


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("first", [40, 100, 170])
def test_a_level_begins_where_it_was_planted(first: int, seed: int) -> None:
    shape = shape_of([s * (1.06 if n >= first else 1) for n, s in enumerate(noisy(0.01, seed))])
    low, high = shape.levels
    assert abs(high.first - first - 1) <= 4
    assert high.seconds / low.seconds == pytest.approx(1.06, abs=0.01)
    assert shape.drift is None


def test_an_episode_is_three_levels() -> None:
    shape = shape_of([s * (1.2 if 70 <= n < 120 else 1) for n, s in enumerate(noisy(0.01, 1))])
    assert [round(level.seconds, 1) for level in shape.levels] == [1.0, 1.2, 1.0]
    assert shape.base == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("rise", [0.05, 0.2, 2.0])
def test_a_rise_is_a_drift_and_no_level(rise: float) -> None:
    shape = shape_of([s * (1 + rise * n / 200) for n, s in enumerate(noisy(0.01, 2))])
    assert shape.drift is not None
    assert shape.drift.rise == pytest.approx(rise, rel=0.25)
    assert shape.base == pytest.approx(1, rel=0.05 + rise / 10)


@pytest.mark.parametrize("interval", [1, 10])
def test_spikes_have_their_period_in_steps(interval: int) -> None:
    shape = shape_of([s * (1.5 if n % 16 == 5 else 1) for n, s in enumerate(noisy(0.01, 3))], interval)
    assert shape.period(shape.bursts()) == 16 * interval
    assert shape.cost(shape.spikes) == pytest.approx(0.5 / 16, rel=0.1)
    assert shape.median == pytest.approx(1, rel=0.01)


def test_spikes_by_chance_have_no_period() -> None:
    random = Random(4)
    shape = shape_of([s * (1.5 if random.random() < 0.08 else 1) for s in noisy(0.01, 4)])
    assert len(shape.bursts()) > 5
    assert shape.period(shape.bursts()) is None


def test_slow_first_steps_are_warm_up() -> None:
    shape = shape_of([s * (3 if n < 12 else 1) for n, s in enumerate(noisy(0.01, 5))])
    assert len(shape.warm_up) == 12
    assert len(shape.levels) == 1


def test_four_lines_have_a_shape() -> None:
    assert shape_of([9.0, 1.0, 1.0, 1.01]).base == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("noise", [0.0005, 0.002])
def test_a_quiet_log_shows_its_level(noise: float) -> None:
    """Lines that average ten steps are quiet: what is left of a level must not count as persistence."""
    draw = Random(3)
    points = [Point(10 * n, (1.0 if n <= 60 else 1.08) * (1 + draw.gauss(0, noise))) for n in range(1, 101)]
    assert [level.first for level in find_shape(points).levels[1:]] == [610]
