"""The module and the samples of each family, for workers; needs torch.

Each family's description names its implementation by import path (families/description.py), so
that a worker imports its own family's code alone.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mpctl.errors import InputError
from mpctl.families import get_family, get_table
from mpctl.families.batch import FamilyModule, Objective
from mpctl.families.parts import ShardContext
from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.operators.table import StageSlice
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.transport.group import Group


@dataclass(frozen=True)
class FamilyImplementation:
    """What workers run of a family: its module class and the class of its samples.

    module is called with (model, training, shard context, *slices): of each stack what the rank's
    pipeline stage has, in the order of the data. It builds parameters without initial values.
    """

    module: Callable[..., FamilyModule]
    samples: type[Objective]


def get_implementation(name: str) -> FamilyImplementation:
    """The code of the family of this name; InputError where its package gives none."""
    path = get_family(name).implementation
    try:
        implementation = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError.of(
            "family-import", "model.family",
            f"{path}, the implementation of family {name}, cannot be imported: {error}",
            "repair the package that it comes from",
        ) from None  # fmt: skip
    if isinstance(implementation, FamilyImplementation):
        return implementation
    raise InputError.of(
        "family-import", "model.family",
        f"{path} is a {type(implementation).__name__}, not an "
        "mpctl.families.modules.FamilyImplementation",
        "repair the package that it comes from",
    )  # fmt: skip


def build_module(
    model: ModelSpec, training: TrainingSpec, *, group: Group, cp: Group, sequence_parallel: bool,
    dtype: torch.dtype, device: torch.device, held: Sequence[StageSlice] | None = None,
    backend: KernelBackend = TORCH_BACKEND,
) -> FamilyModule:  # fmt: skip
    """What a stage holds of the family's module, by default all of it; uninitialised.
    backend: the kernels that its attention and norms call (kernels/backend.py)."""
    if held is None:
        table = get_table(model, tp=group.size)
        held = table.stage_slices([(0, table.layers)])
    place = ShardContext(group, cp, sequence_parallel, dtype, device, backend)
    return get_implementation(model.family).module(model, training, place, *held)
