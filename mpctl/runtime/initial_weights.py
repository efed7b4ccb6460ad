"""The weights of another model as the first ones of a run (training.init_from).

By hand: a run that starts from GPT-2's weights has GPT-2's loss on the data before its first step.
"""

from __future__ import annotations

from pathlib import Path

from mpctl.layers.parameters import shard_of
from mpctl.runtime.batches import model_of
from mpctl.runtime.model_weights import read_values
from mpctl.runtime.train import Trainer
from mpctl.weights.extend import fill_tables
from mpctl.weights.origin import open_origin


def start_from(trainer: Trainer, path: Path) -> None:
    """Give a trainer the weights of another model of its shape, into float32 masters where there
    are any; step, moments and data order are those of a fresh run. Raises InputError where the
    model is of another shape or cannot be read."""
    trainer.environment.activity.phase = f"reading initial weights from {path}"
    optimizer, batches, names = trainer.optimizer, trainer.batches, trainer.names
    values = {p: optimizer.full_value(p).detach() for p in names}
    targets = {name: (shard_of(p), values[p]) for p, name in names.items()}
    origin, model = open_origin(path), model_of(trainer.job)
    targets = fill_tables(origin, model, targets, batches.extension, reserved=batches.reserved_ids)
    read_values(origin, targets, model)
    for parameter, value in values.items():
        optimizer.set_value(parameter, value)
    optimizer.publish()
