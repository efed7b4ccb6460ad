"""The learning rate of every step: a warm-up, then one of four schedules.

Step s counts from 0. With w = warmup_steps, D = lr_decay_steps (steps when absent), peak =
learning_rate and low = min_learning_rate (absent: 3e-5, at most the peak):

    warm-up   s < w                peak (s + 1) / w
    constant                       peak
    linear    x = (s - w) / (D - w), at most 1    peak - (peak - low) x
    cosine                         low + (peak - low) (1 + cos(pi x)) / 2       arXiv 1608.03983
    wsd       until D - a          peak, with a = lr_wsd_decay_steps             arXiv 2404.06395
              then, y = (s - D + a) / a, at most 1      low + (peak - low) f(y)

f by lr_wsd_decay_style, 1 at y = 0 and 0 at y = 1 (Megatron-LM's names and formulas): linear 1 - y,
cosine (1 + cos(pi y)) / 2, exponential 2 (1/2)^y - 1, minus_sqrt 1 - sqrt(y). From step D on the
rate is low, under constant the peak. A run that is resumed with more steps keeps its rates where
lr_decay_steps is set.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from mpctl.spec.training import TrainingSpec

WSD_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda y: 1 - y,
    "cosine": lambda y: 0.5 * (1 + math.cos(math.pi * y)),
    "exponential": lambda y: 2 * 0.5**y - 1,
    "minus_sqrt": lambda y: 1 - math.sqrt(y),
}


def learning_rate(training: TrainingSpec, step: int) -> float:
    """The rate of step `step`, from 0; defined for every step, beyond the last one too."""
    peak, low, warmup = training.learning_rate, training.lowest_rate, training.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    end = training.lr_decay_steps or training.steps
    if training.lr_schedule == "constant":
        return peak
    if training.lr_schedule == "wsd":
        decay = training.lr_wsd_decay_steps or 0
        y = _progress(step, end - decay, decay)
        return peak if y == 0 else low + (peak - low) * WSD_SHAPES[training.lr_wsd_decay_style](y)
    x = _progress(step, warmup, end - warmup)
    if training.lr_schedule == "linear":
        return low + (peak - low) * (1 - x)
    return low + 0.5 * (peak - low) * (1 + math.cos(math.pi * x))


def _progress(step: int, start: int, span: int) -> float:
    """How much of a decay of `span` steps from `start` is done: 0 to 1."""
    return min(1.0, max(0, step - start) / max(1, span))
