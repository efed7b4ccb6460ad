"""What workers run of this family: its module and its samples. Needs torch."""

from __future__ import annotations

from mpctl.families.modules import FamilyImplementation
from mpctl.families.t5.module import T5
from mpctl.families.t5.samples import T5Samples

IMPLEMENTATION = FamilyImplementation(module=T5, samples=T5Samples)
