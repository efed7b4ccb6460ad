"""What workers run of this family: its module and its samples. Needs torch."""

from __future__ import annotations

from mpctl.families.glm.module import GLM
from mpctl.families.glm.samples import GlmSamples
from mpctl.families.modules import FamilyImplementation

IMPLEMENTATION = FamilyImplementation(module=GLM, samples=GlmSamples)
