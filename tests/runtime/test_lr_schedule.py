"""Schedules of the learning rate: by hand, their bounds, and today's cosine to the last bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.runtime.optimizer import WSD_SHAPES, learning_rate
from mpctl.spec.training import TrainingSpec

SCHEDULES = [("constant", "linear"), ("linear", "linear"), ("cosine", "linear")]
SCHEDULES += [("wsd", style) for style in WSD_SHAPES]


def rates(count: int, **settings: Any) -> list[float]:
    return [learning_rate(TrainingSpec(**settings), step) for step in range(count)]


@given(st.integers(0, 50), st.integers(1, 300), st.integers(0, 400))
def test_the_default_is_the_cosine_of_before_to_the_last_bit(w: int, steps: int, step: int) -> None:
    training = TrainingSpec(warmup_steps=w, steps=steps)
    peak, low = training.learning_rate, training.lowest_rate
    expected = peak * (step + 1) / w if step < w else None
    if expected is None:
        progress = min(1.0, (step - w) / max(1, steps - w))
        expected = low + 0.5 * (peak - low) * (1 + math.cos(math.pi * progress))
    assert learning_rate(training, step) == expected


@pytest.mark.parametrize(
    ("schedule", "style", "expected"),
    [
        ("constant", "linear", [0.5, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", "linear", [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
        ("cosine", "linear", [0.5, 1, 1, 0.8535534, 0.5, 0.1464466, 0, 0]),
        ("wsd", "linear", [0.5, 1, 1, 1, 1, 0.5, 0, 0]),
        ("wsd", "cosine", [0.5, 1, 1, 1, 1, 0.5, 0, 0]),
        ("wsd", "exponential", [0.5, 1, 1, 1, 1, 0.4142136, 0, 0]),
        ("wsd", "minus_sqrt", [0.5, 1, 1, 1, 1, 0.2928932, 0, 0]),
    ],
)
def test_by_hand(schedule: Any, style: Any, expected: list[float]) -> None:
    """Two steps of warm-up, then until step 6; wsd decays over the last two."""
    found = rates(8, learning_rate=1.0, min_learning_rate=0.0, warmup_steps=2, steps=6,
                  lr_schedule=schedule, lr_wsd_decay_style=style,
                  lr_wsd_decay_steps=2)  # fmt: skip
    assert found == pytest.approx(expected, abs=1e-7)


@given(st.sampled_from(SCHEDULES), st.integers(0, 20), st.integers(1, 60), st.data())
def test_bounds_and_continuity(
    kind: tuple[Any, Any], warmup: int, room: int, data: st.DataObject
) -> None:
    """Up to the peak in the warm-up, never up again, at most to the minimum, where it stays."""
    schedule, style = kind
    decay = data.draw(st.integers(1, room))
    end = warmup + room
    found = rates(end + 5, learning_rate=1.0, min_learning_rate=0.1, warmup_steps=warmup, steps=7,
                  lr_decay_steps=end, lr_schedule=schedule, lr_wsd_decay_style=style,
                  lr_wsd_decay_steps=decay)  # fmt: skip
    rise, rest = found[:warmup], found[warmup:]
    assert rise == sorted(rise) and (not rise or rise[-1] == 1.0)
    assert rest[0] == 1.0 and rest == sorted(rest, reverse=True)
    last = 1.0 if schedule == "constant" else 0.1
    assert rest[room:] == pytest.approx([last] * 5, rel=1e-12)
    if schedule == "wsd":
        assert set(rest[: room - decay + 1]) == {1.0}


def test_more_steps_do_not_change_the_rates_where_the_decay_has_its_own() -> None:
    kept = [rates(100, steps=steps, lr_decay_steps=60) for steps in (60, 90)]
    assert kept[0] == kept[1]
    assert rates(100, steps=60) != rates(100, steps=90)


def test_a_peak_below_the_default_minimum_stays_as_it_is() -> None:
    """Fine-tuning at 1e-5 needs no second setting: the default minimum of 3e-5 gives way."""
    assert TrainingSpec(learning_rate=3e-4).lowest_rate == 3e-5
    assert set(rates(200, learning_rate=1e-5, warmup_steps=0)) == {1e-5}
