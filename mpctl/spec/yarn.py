"""YaRN's magnitudes, and those of latent attention as other software states them: mscale and
mscale_all_dim of a factor.

With g(m) = 0.1 m ln(factor) + 1 (arXiv 2309.00071, equation 22), queries and keys are multiplied by
g(mscale) / g(mscale_all_dim), yarn_scaling's attention_factor, and scores by
g(mscale_all_dim)^2 / sqrt(columns), model.attention_scale. By hand, DeepSeek-V3 has factor 40 and 1
for both: 1, and 1.3689^2 / sqrt(192) = 0.1352.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mpctl.spec.model import ModelSpec, YarnScaling

USUAL = {"original_max_position": 4096.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""Values that Megatron-Core's command line leaves at their defaults (MLATransformerConfig)."""


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """0.1 scale ln(factor) + 1 (YaRN, arXiv 2309.00071, equation 22), 1 for factors up to 1.

    >>> round(yarn_magnitude(40.0), 4)
    1.3689
    """
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def scale_of(factor: float, magnitude: float) -> float:
    """The scale that has this magnitude, to 12 digits."""
    return float(f"{(magnitude - 1) / (0.1 * math.log(factor)):.12g}")


def score_scale(columns: int, factor: float, mscale_all_dim: float) -> float:
    """The factor of the scores of queries of this many columns.

    >>> round(score_scale(192, 40.0, 1.0), 4)
    0.1352
    """
    return float(columns**-0.5 * yarn_magnitude(factor, mscale_all_dim) ** 2)


class YarnScales(NamedTuple):
    """A factor with the two scales of its magnitudes."""

    factor: float
    mscale: float
    mscale_all_dim: float

    @property
    def attention_factor(self) -> float:
        """The factor of queries and keys."""
        return yarn_magnitude(self.factor, self.mscale) / yarn_magnitude(self.factor, self.mscale_all_dim)

    def attention_scale(self, columns: int) -> float | None:
        """The factor of scores of this many columns; None where it is the usual one."""
        if self.mscale_all_dim == 0:
            return None
        return score_scale(columns, self.factor, self.mscale_all_dim)


def find_yarn(model: ModelSpec) -> YarnScales | None:
    """The scales that give a model's yarn_scaling and attention_scale; None where none do, or the
    model has none."""
    scaling, scale = model.yarn_scaling, model.attention_scale
    if scaling is None or scaling.factor <= 1 or not model.is_mla:
        return None
    below = 1.0 if scale is None else math.sqrt(scale * math.sqrt(model.qk_size))
    magnitude = scaling.attention_factor or yarn_magnitude(scaling.factor)
    yarn = YarnScales(scaling.factor, *(scale_of(scaling.factor, m) for m in (magnitude * below, below)))
    return yarn if yarn.attention_scale(model.qk_size) == scale else None


def is_usual(scaling: YarnScaling) -> bool:
    return all(getattr(scaling, key) == value for key, value in USUAL.items())
