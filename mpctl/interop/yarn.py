"""YaRN of latent attention as other software states it: mscale and mscale_all_dim of a factor.

With g(m) = 0.1 m ln(factor) + 1 (arXiv 2309.00071, equation 22), queries and keys are multiplied by
g(mscale) / g(mscale_all_dim), yarn_scaling's attention_factor, and scores by
g(mscale_all_dim)^2 / sqrt(columns), model.attention_scale. By hand, DeepSeek-V3 has factor 40 and 1
for both: 1, and 1.3689^2 / sqrt(192) = 0.1352.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mpctl.spec.hf import yarn_magnitude
from mpctl.spec.model import ModelSpec, YarnScaling

USUAL = {"original_max_position": 4096.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""What Megatron-Core's command line leaves as it is (MLATransformerConfig)."""


class YarnScales(NamedTuple):
    """A factor with the two scales of its magnitudes."""

    factor: float
    mscale: float
    mscale_all_dim: float

    @property
    def attention_factor(self) -> float:
        return yarn_magnitude(self.factor, self.mscale) / yarn_magnitude(
            self.factor, self.mscale_all_dim
        )

    def attention_scale(self, columns: int) -> float | None:
        """The factor of scores of this many columns; None where it is the usual one."""
        if self.mscale_all_dim == 0:
            return None
        return float(columns**-0.5 * yarn_magnitude(self.factor, self.mscale_all_dim) ** 2)


def find_yarn(model: ModelSpec) -> YarnScales | None:
    """The scales that give a model's yarn_scaling and attention_scale; None where none do, or the
    model has none."""
    scaling, scale = model.yarn_scaling, model.attention_scale
    if scaling is None or scaling.factor <= 1 or not model.is_mla:
        return None
    below = 1.0 if scale is None else math.sqrt(scale * math.sqrt(model.qk_size))
    magnitude = scaling.attention_factor or yarn_magnitude(scaling.factor)
    yarn = YarnScales(scaling.factor, *(_scale(scaling, m) for m in (magnitude * below, below)))
    return yarn if yarn.attention_scale(model.qk_size) == scale else None


def _scale(scaling: YarnScaling, magnitude: float) -> float:
    """The m with this magnitude."""
    return float(f"{(magnitude - 1) / (0.1 * math.log(scaling.factor)):.12g}")


def is_usual(scaling: YarnScaling) -> bool:
    return all(getattr(scaling, key) == value for key, value in USUAL.items())
