"""The module and the samples of each family, for workers; needs torch.

Each family's description names its implementation by import path (families/description.py), so
that a worker imports its own family's code alone.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpctl.errors import InputError
from mpctl.families import get_family, get_table
from mpctl.families.batch import FamilyModule, Objective
from mpctl.layers.shard_context import ShardContext
from mpctl.operators.table import StageSlice
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec


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
    model: ModelSpec,
    training: TrainingSpec,
    shard_context: ShardContext,
    stage_slices: Sequence[StageSlice] | None = None,
) -> FamilyModule:
    """This rank's share of a pipeline stage's module, with uninitialised parameters.

    shard_context: how it is cut, its dtype and device, and the kernels that it calls.
    stage_slices: what the stage has of each stack of layers; by default all of the model.
    """
    if stage_slices is None:
        table = get_table(model, tp=shard_context.tp.size)
        stage_slices = table.stage_slices([(0, table.layers)])
    implementation = get_implementation(model.family)
    return implementation.module(model, training, shard_context, *stage_slices)
