"""Updates of tensors whose states are stored in fewer bits than they are computed in, and those of SGD
and Lion: element by element, in float32 (float64 of float64), rounded once when they are stored.

    adamw   m = m + (1 - b1)(g - m), v = b2 v + (1 - b2) g^2              arXiv 1711.05101
            w = w (1 - r d) - r m / (1 - b1^n) / (sqrt(v / (1 - b2^n)) + e)
    lion    w = w (1 - r d) - r sign(b1 m + (1 - b1) g), m = m + (1 - b2)(g - m)   arXiv 2302.06675
    sgd     g = g + d w, u = b u + g, w = w - r u; without momentum u = g      torch.optim.SGD

w: value, g: gradient, n: number of updates, r: rate, d: weight decay, e: epsilon. Every element is computed
by itself, so that a layout that cuts tensors otherwise gives the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PIECE, DEVICE_PIECE = 1 << 16, 1 << 22
"""Elements that are computed at a time, on a CPU and elsewhere: copies of these are alive."""


class UpdateSettings(NamedTuple):
    """Settings of an update, as in the formulas."""

    rate: float
    weight_decay: float
    beta1: float
    beta2: float
    epsilon: float
    momentum: float


Rule = Callable[[UpdateSettings, Tensor, Tensor, Tensor, Sequence[Tensor]], tuple[Tensor, ...]]
"""(settings, number of this update, value, gradient, moments) -> the new value and moments."""


def _adamw(
    s: UpdateSettings, count: Tensor, value: Tensor, gradient: Tensor, moments: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    average, square = moments
    average = torch.lerp(average, gradient, 1 - s.beta1)
    square = s.beta2 * square + (1 - s.beta2) * gradient * gradient
    first, second = (1 - beta ** count.double() for beta in (s.beta1, s.beta2))
    size = (s.rate / first).to(value.dtype)
    root = (square / second.to(value.dtype)).sqrt() + s.epsilon
    return value * (1 - s.rate * s.weight_decay) - size * average / root, average, square


def _lion(
    s: UpdateSettings, count: Tensor, value: Tensor, gradient: Tensor, moments: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    (average,) = moments
    sign = torch.lerp(average, gradient, 1 - s.beta1).sign()
    return value * (1 - s.rate * s.weight_decay) - s.rate * sign, torch.lerp(average, gradient, 1 - s.beta2)


def _sgd(
    s: UpdateSettings, count: Tensor, value: Tensor, gradient: Tensor, moments: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    velocity = gradient + s.weight_decay * value
    kept = tuple(velocity := s.momentum * moment + velocity for moment in moments)
    return value - s.rate * velocity, *kept


RULES: dict[str, Rule] = {"adamw": _adamw, "lion": _lion, "sgd": _sgd}


@torch.no_grad()
def update_tensors(
    rule: Rule,
    settings: UpdateSettings,
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: Sequence[Sequence[Tensor]],
    updates: Sequence[Tensor],
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Make an update. moments: of each value; updates: float32 scalars, numbers of updates in the moments,
    incremented. grad_scale, found_inf: as in AdamWStep."""
    for value, gradient, own, count in zip(values, gradients, moments, updates, strict=True):
        count += 1 if found_inf is None else 1 - found_inf
        wide = torch.promote_types(value.dtype, torch.float32)
        size = PIECE if value.device.type == "cpu" else DEVICE_PIECE
        for piece in zip(*(tensor.view(-1).split(size) for tensor in (value, gradient, *own)), strict=True):
            old, slope, *kept = (tensor.to(wide) for tensor in piece)
            if grad_scale is not None:
                slope = slope / grad_scale
            changed = rule(settings, count, old, slope, kept)
            for target, new in zip((piece[0], *piece[2:]), changed, strict=True):
                target.copy_(new if found_inf is None else torch.where(found_inf == 1, target.to(wide), new))
