"""What workers run of this family: its module and its samples. Needs torch."""

from __future__ import annotations

from mpctl.families.gpt.module import GPT
from mpctl.families.gpt.samples import GptSamples
from mpctl.families.modules import FamilyImplementation

IMPLEMENTATION = FamilyImplementation(module=GPT, samples=GptSamples)
