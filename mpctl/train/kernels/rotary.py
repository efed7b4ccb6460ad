"""Rotary positions: pair (x_i, x_{i+d/2}) of a head turned by the angle position * base^(-2i/d).

RoFormer (arXiv 2104.09864, equation 34). Turning q by m and k by n leaves their product a function
of m - n alone. The pairs are the halves of the head, as Hugging Face's Llama weights have them; the
paper pairs neighbours, which is the same up to a permutation of the head. Head of 2, position 1:

>>> [round(x, 4) for x in Rotary(2).turn(torch.tensor([[1.0, 0.0]]), range(1, 2))[0].tolist()]
[0.5403, 0.8415]

Angles are taken in float64 and rounded once; the turn is float32 for 16-bit heads. Nothing but the
table, s*d floats, is saved for backward. No parameters: a value that layers may share, as they
share the table (`RotaryTables`).

Letters: b batch, a heads, s sequence, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mpctl.spec.yarn import yarn_magnitude
from mpctl.train.kernels.masks import Positions, numbers

CosSin = tuple[Tensor, Tensor]  # cos and sin of the angles, as Rotary.table gives them

LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position")


@dataclass(frozen=True)
class Yarn:
    """YaRN's stretch of the slow frequencies to a longer context (arXiv 2309.00071, section 3.2).

    Columns that turn more than `fast` times in the original length keep their frequency, those that
    turn less than `slow` times are `factor` times slower, and in between the blend is linear in the
    column. attention_factor: factor of cos and sin; 0.1 ln(factor) + 1 by default (equation 22).
    truncate: round the first and last of the columns in between outwards.
    """

    factor: float
    original_max_position: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        """The factor of cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        return yarn_magnitude(self.factor)

    def stretched(self, plain: Tensor, base: float) -> Tensor:
        """The frequencies [r/2] float64 of a head whose r turned columns have these plain ones."""
        half = len(plain)

        def column(turns: float) -> float:
            """Return the index of the frequency that makes `turns` turns over the original length."""
            return half * math.log(self.original_max_position / (turns * 2 * math.pi), base)

        first, last = column(self.beta_fast), column(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        width = last - first or 0.001
        columns = torch.arange(half, dtype=torch.float64, device=plain.device)
        slowed = ((columns - first) / width).clamp(0, 1)
        return plain * (1 - slowed + slowed / self.factor)


@dataclass(frozen=True)
class Rotary:
    """The law of the angles. Raises ValueError for an odd head_dim or a scaling that lacks a key.

    scaling: Llama 3.1's stretch of the slow frequencies to a longer context, a mapping of factor,
    low_freq_factor, high_freq_factor and original_max_position; yarn: YaRN's. columns: how many of
    a head are turned, the first ones (GPT-NeoX); all by default.
    """

    head_dim: int
    base: float = 10000.0
    scaling: Mapping[str, float] | None = None
    columns: int | None = None
    yarn: Yarn | None = None

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd, rotary positions turn pairs")
        if self.turned % 2 or not 0 < self.turned <= self.head_dim:
            raise ValueError(f"columns {self.turned} of {self.head_dim}: rotary turns pairs")
        lacking = [key for key in LLAMA3_KEYS if key not in (self.scaling or LLAMA3_KEYS)]
        if lacking:
            raise ValueError(f"rotary scaling lacks {', '.join(lacking)}")

    @property
    def turned(self) -> int:
        """Columns of a head that are turned."""
        return self.head_dim if self.columns is None else self.columns

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """[d/2] float64, radians a position, of the columns that are turned."""
        exponent = torch.arange(0, self.turned, 2, dtype=torch.float64, device=device)
        plain = self.base ** (-exponent / self.turned)
        if self.yarn is not None:
            return self.yarn.stretched(plain, self.base)
        return plain if self.scaling is None else _stretched(plain, self.scaling)

    def table(self, positions: Positions, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [s, d/2] of positions [s], or [b, 1, s, d/2] of positions [b, s]."""
        rows = numbers(positions, like.device)
        angles = rows.double()[..., None] * self.frequencies(like.device)
        angles = angles if rows.ndim == 1 else angles[:, None]
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        cos, sin = angles.cos(), angles.sin()
        if self.yarn is not None:
            cos, sin = cos.mul_(self.yarn.magnitude), sin.mul_(self.yarn.magnitude)
        return cos.to(dtype), sin.to(dtype)

    def turn(self, x: Tensor, positions: Positions) -> Tensor:
        """x [b, a, s, d] turned by the global positions [s] or [b, s] of its rows."""
        return rotated(x, *self.table(positions, x))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, a, s, d] turned by a table, cos and sin [s, r/2] or [b, 1, s, r/2]."""
    # [b, a, s, d] -> 2 of [b, a, s, d/2] -> [b, a, s, d]; what is not turned follows as it is
    half = cos.shape[-1]
    low, high, rest = x.tensor_split((half, 2 * half), dim=-1)
    parts = [low * cos - high * sin, high * cos + low * sin]
    if rest.shape[-1]:
        parts.append(rest.to(parts[0].dtype))
    return torch.cat(parts, dim=-1).to(x.dtype)


def _stretched(plain: Tensor, scaling: Mapping[str, float]) -> Tensor:
    """Llama 3.1's law (Hugging Face, modeling_rope_utils.py, `llama3`), of the wavelength.

    Below original / high_freq_factor as it is, above original / low_freq_factor `factor` times
    slower, and in between a blend that is linear in original / wavelength.
    """
    factor, low, high, original = (scaling[key] for key in LLAMA3_KEYS)
    turns = original * plain / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (share + (1 - share) / factor)
