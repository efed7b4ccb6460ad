"""Loads a model's weights from a checkpoint of any layout or a Hugging Face directory: to use the
model without training it, or as the initial weights of a run (training.init_from).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from mpctl.core.errors import InputError, Issue, attempt
from mpctl.model.operators.adapters import is_of_adapter
from mpctl.records.checkpoint.manifest import read_manifest
from mpctl.records.checkpoint.saved_model import SavedModel
from mpctl.spec.model import ModelSpec
from mpctl.train.checkpoint.reader import ReadTargets, Targets
from mpctl.train.families.implementation import FamilyModule
from mpctl.train.layers.adapters import lengthened, row_norms
from mpctl.train.layers.experts import ParallelExperts
from mpctl.train.layers.parameters import shard_of
from mpctl.train.runtime.batches import model_of
from mpctl.train.runtime.partition import stage_model
from mpctl.train.runtime.train import Trainer
from mpctl.train.weights.extend import fill_tables
from mpctl.train.weights.hub import Hub
from mpctl.train.weights.origin import open_origin, origin_adapter
from mpctl.train.weights.values import Values, base_reference, base_values, require_mergeable, router_biases_of


@torch.no_grad()
def load_chunks(chunks: list[FamilyModule], model: ModelSpec, origin: Path) -> None:
    """Fill the chunks of one stage with the values at `origin`, in the chunks' dtype: a run, one
    of its checkpoints, an import or a Hugging Face directory. Raises InputError naming the file and
    the tensor that is missing or damaged."""
    parameters = dict(stage_model(chunks).named_parameters())
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    targets = {name: (shard_of(parameter), parameter.data) for name, parameter in parameters.items()}
    opened = open_origin(origin)
    value_reader(opened, targets)(targets)
    biases = router_biases_of(opened)
    for name, module in stage_model(chunks).named_modules():
        if isinstance(module, ParallelExperts) and name in biases:
            module.router_bias.copy_(torch.tensor(biases[name]))


def value_reader(origin: Hub | SavedModel, names: Iterable[str]) -> ReadTargets:
    """What fills targets, by their parameters' names, with their parts of the values at `origin`. Adapters at `origin`
    are merged into the weights that they add to, unless they are among `names`, of all that is to be read."""
    values = Values.of(origin)
    if any(map(is_of_adapter, names)):
        return values.read
    require_mergeable(values)
    return values.read_merged


def _require_saved(trainer: Trainer, extended: Collection[str]) -> None:
    """Raises InputError where new rows of a table would be neither trained nor saved: those of a frozen base."""
    layout = trainer.partition.layout
    if lost := sorted(name for name in extended if not layout.is_saved(name)):
        message = f"{lost[0]} gets rows for the tokenizer's new pieces, which a frozen base does not train"
        hint = "use training.adapter.modules_to_save embed_tokens, with lm_head where the model has its own"
        raise InputError.of("adapter-extended", "training.adapter.modules_to_save", message, hint)


def resume_from(trainer: Trainer, checkpoint: Path) -> None:
    """Continue a trainer from a checkpoint of its run. Raises InputError if it is damaged, of another model, or if the
    base of its adapters is gone or another one."""
    reference = read_manifest(checkpoint).base
    base = None if reference is None else base_values(checkpoint, model_of(trainer.job), reference)
    trainer.resume(checkpoint, None if base is None else base.read)


@torch.no_grad()
def start_lengths(trainer: Trainer) -> None:
    """Give DoRA's lengths the norms of the rows that training starts from, of full values, which ZeRO may
    have sliced; every rank calls it."""
    optimizer, found = trainer.optimizer, list(lengthened(trainer.model))
    for weight, adapter in found:
        lengths = cast(nn.Parameter, adapter.magnitude)
        value = optimizer.full_value(lengths).detach()
        wide = torch.promote_types(value.dtype, torch.float32)
        factors = cast(nn.Parameter, adapter.A.weight), cast(nn.Parameter, adapter.B.weight)
        base, a, b = (optimizer.full_value(p).to(lengths.device, wide) for p in (weight, *factors))
        value.copy_(row_norms(adapter.rows(base), a, b, adapter.scale, adapter.columns))
        optimizer.set_value(lengths, value)
    if found:
        optimizer.publish()


def start_from(trainer: Trainer, path: Path) -> None:
    """Give a trainer the weights of another model of the same shape, into float32 masters if there
    are any; step, moments and data order are those of a fresh run. One parameter at a time is in memory
    unsharded; replicas take the same ones together. Raises InputError if the model has another shape or
    cannot be read."""
    trainer.environment.activity.phase = f"reading initial weights from {path}"
    optimizer, origin = trainer.optimizer, open_origin(path)
    is_anew = origin_adapter(origin) is None  # adapters of the job then keep the values that they have
    names = {p: name for p, name in trainer.names.items() if not (is_anew and is_of_adapter(name))}
    read = value_reader(origin, names.values())
    if issues := [issue for p, name in names.items() for issue in _start_value(trainer, origin, read, p, name)]:
        raise InputError(issues)
    if trainer.partition.layout.reads_base and trainer.mesh.rank == 0:  # which writes the manifest
        trainer.base = base_reference(path, origin)
    optimizer.publish()
    trainer.routing.log.load(router_biases_of(origin))
    if is_anew:
        start_lengths(trainer)


def _start_value(
    trainer: Trainer, origin: Hub | SavedModel, read: ReadTargets, parameter: Tensor, name: str
) -> list[Issue]:
    """Give one parameter its value at `origin`; returns what is wrong with that value."""
    optimizer, batches, model = trainer.optimizer, trainer.batches, model_of(trainer.job)
    value = optimizer.full_value(parameter).detach()
    targets: Targets = {name: (shard_of(parameter), value)}
    left = fill_tables(origin, model, targets, batches.extension, reserved=batches.reserved_ids)
    _require_saved(trainer, targets.keys() - left.keys())
    issues: list[Issue] = []
    attempt(issues, lambda: read(left))
    optimizer.set_value(parameter, value)
    return issues
