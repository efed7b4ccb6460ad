"""Checkpoints that any layout can read: safetensors shards that say which part of each parameter
they hold.

RUN/checkpoints/step-N/ holds one `shard-K.safetensors` a tensor-parallel rank of a pipeline stage
(value and AdamW's moments of its parameters; K = stage tp + rank), `shard-K.json` beside it (of
each parameter its full shape, the blocks kept of each dimension, and updates; bytes and sha256 of
the file), `manifest.json`, and copies of the run's job.json and plan.json. Only the first replica
saves, and of a parameter that several stages hold only the first stage; ZeRO slices are
gathered before they are written, so that a file does not depend on the ZeRO stage. This module
reads checkpoints; saver.py writes them.

How many updates a parameter has seen is AdamW's step, on which its bias correction depends. It is
kept by parameter, since one that was frozen at first has seen fewer than the others.

Each rank checks what it reads while it reads it, once (weights/shard_reader.py); CheckpointDamaged
says which bytes have changed, and the launcher then uses the checkpoint before.

A frozen parameter has no moments: its value is saved alone, in its own dtype, to the bit, and the
record names it under `frozen`. A run that trains it reads the value and starts its moments at 0; a
run that freezes what was trained reads the value alone.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from mpctl.layers.parameters import shard_of
from mpctl.rundir.shards import Manifest
from mpctl.runtime.optimizer import Optimizer
from mpctl.shard import Shard
from mpctl.weights.saved_tensors import OpenCheckpoint


def load(
    folder: Path,
    names: dict[Tensor, str],
    optimizer: Optimizer,
    *,
    model: Collection[str],
    may_lack: dict[str, int],
) -> Manifest:
    """Fill parameters and the optimizer's moments from a checkpoint of any layout; returns its
    manifest.

    names: of all parameters here, the frozen ones too; model: those of every stage. may_lack: by
    parameter, the first row that a checkpoint need not hold (vocabulary padding, whose height
    depends on tp). Raises InputError naming file and tensor.
    """
    checkpoint = OpenCheckpoint.of(folder)
    checkpoint.require_names(model)
    for parameter, tensors in optimizer.states():
        name = names[parameter]
        tensors["value"] = tensors["value"].clone()
        if name in checkpoint.frozen:
            tensors = {"value": tensors["value"]}
        checkpoint.fill(name, shard_of(parameter), tensors, may_lack.get(name))
        optimizer.load(parameter, tensors, updates=checkpoint.updates_of(name))
    optimizer.publish()
    for frozen, name in names.items():
        if frozen not in optimizer.trained:
            value = optimizer.full_value(frozen).detach()
            checkpoint.fill(name, shard_of(frozen), {"value": value}, may_lack.get(name))
            optimizer.set_value(frozen, value)
    return checkpoint.manifest


@torch.no_grad()
def load_values(
    folder: Path, targets: dict[str, tuple[Shard, Tensor]], *, may_lack: dict[str, int]
) -> None:
    """Fill tensors from the values in a checkpoint of any layout; moments and step count are not
    read. targets: by parameter name, the part of it to read and the tensor to fill. may_lack: as in
    `load`; vocabulary padding that was not saved becomes zeros. Raises InputError."""
    checkpoint = OpenCheckpoint.of(folder)
    for name, (shard, tensor) in targets.items():
        if name in may_lack:
            tensor.zero_()
        checkpoint.fill(name, shard, {"value": tensor}, may_lack.get(name))
