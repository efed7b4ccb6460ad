"""ALiBi: attention scores fall with the distance of query and key, by a slope of each head.

Press et al., arXiv 2108.12409, section 3: the score of query i and key j <= i loses m (i - j). Of n
heads, a power of two, head k = 1 .. n has the slope m = 2^(-8 k / n); of other numbers the largest
power of two below has these, and the heads beyond it every second slope of twice as many (their
released code, as BLOOM has it). No parameters; nothing depends on the layout.

>>> slopes(4).tolist()
[0.25, 0.0625, 0.015625, 0.00390625]
"""

from __future__ import annotations

from math import floor, log2

import torch
from torch import Tensor

from mpctl.kernels.masks import Positions, numbers


def slopes(
    heads: int, own: range | None = None, device: torch.device | str | None = None
) -> Tensor:
    """The slopes of the heads `own` of `heads`, all by default: [a], float64 on `device`.

    Made once, where a layer is built: a step copies nothing from the host.
    """
    power = 2 ** floor(log2(heads))
    whole = [2 ** (-8 * (k + 1) / power) for k in range(power)]
    between = [2 ** (-4 * (k + 1) / power) for k in range(0, 2 * (heads - power), 2)]
    of_all = (*whole, *between)
    chosen = of_all if own is None else of_all[own.start : own.stop]
    return torch.tensor(chosen, dtype=torch.float64, device=device)


def distance_bias(of_heads: Tensor, rows: Positions, keys: int, like: Tensor) -> Tensor:
    """What is added to the scores of these heads: [1, a, q, s] of the dtype and device of `like`.

    of_heads: their slopes, on that device. rows: global positions of the q queries; keys: how many,
    from position 0.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    queries, positions = numbers(rows, like.device), numbers(range(keys), like.device)
    distance = (positions - queries[:, None]).to(dtype)
    # [a, 1, 1] x [q, s] -> [1, a, q, s]
    return (of_heads.to(dtype)[:, None, None] * distance)[None].to(like.dtype)
