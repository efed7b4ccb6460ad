"""The module and the objective of each family, for the runtime; torch is needed to look here.

A module's class takes (model, training, place, *held): what a stage holds of each of its stacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpctl.families import get_table
from mpctl.families.batch import FamilyModule, Objective
from mpctl.families.bert import samples as bert
from mpctl.families.bert.module import BERT
from mpctl.families.glm import samples as glm
from mpctl.families.glm.module import GLM
from mpctl.families.gpt import samples as gpt
from mpctl.families.gpt.module import GPT
from mpctl.families.parts import ShardContext
from mpctl.families.t5 import samples as t5
from mpctl.families.t5.module import T5
from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.operators.table import StageSlice
from mpctl.spec.model import FamilyName, ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.transport.group import Group

MODULES: dict[FamilyName, Any] = {"gpt": GPT, "bert": BERT, "t5": T5, "glm": GLM}
OBJECTIVES: dict[FamilyName, type[Objective]] = {
    "gpt": gpt.GptSamples,
    "bert": bert.BertSamples,
    "t5": t5.T5Samples,
    "glm": glm.GlmSamples,
}


def build_module(
    model: ModelSpec, training: TrainingSpec, *, group: Group, cp: Group, sequence_parallel: bool,
    dtype: torch.dtype, device: torch.device, held: Sequence[StageSlice] | None = None,
    backend: KernelBackend = TORCH_BACKEND,
) -> FamilyModule:  # fmt: skip
    """What a stage holds of the family's module, by default all of it; uninitialised.
    backend: the kernels that its attention and norms call (kernels/backend.py)."""
    if held is None:
        table = get_table(model, tp=group.size)
        held = table.held([(0, table.layers)])
    place = ShardContext(group, cp, sequence_parallel, dtype, device, backend)
    module: FamilyModule = MODULES[model.family](model, training, place, *held)
    return module
