"""What workers run of this family: its module and its samples. Needs torch."""

from __future__ import annotations

from mpctl.families.bert.module import BERT
from mpctl.families.bert.samples import BertSamples
from mpctl.families.modules import FamilyImplementation

IMPLEMENTATION = FamilyImplementation(module=BERT, samples=BertSamples)
