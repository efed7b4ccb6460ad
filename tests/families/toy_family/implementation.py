"""What workers run of the toy family."""

from __future__ import annotations

from mpctl.families.implementation import FamilyImplementation

from .module import Toy
from .samples import ToySamples

IMPLEMENTATION = FamilyImplementation(module=Toy, samples=ToySamples)
