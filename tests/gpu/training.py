"""One rank's training on a device, as `mpctl launch` builds it there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mpctl.spec.job import JobSpec
from mpctl.train.runtime.device import prepare_device
from mpctl.train.runtime.train import Trainer
from tests.train.runtime.tiny import make_trainer, tiny_job

SMALL = {
    "model__hidden": 64,
    "training__steps": 4,
    "checkpoint__interval": 0,
    "checkpoint__at_end": False,
    "training__eval_samples": 0,
}


def small_job(device: torch.device, data: Path, **changes: Any) -> JobSpec:
    """Four steps of the tiny job with heads of 16, dropout on, on this kind of device."""
    settings = {**SMALL, "launch__device": device.type, **changes}
    return tiny_job(data, settings.pop("tp", 1), settings.pop("dp", 1), **settings)


def trainer_of(job: JobSpec, run_dir: Path) -> Trainer:
    """The trainer of the only rank."""
    prepare_device(job, 0)
    return make_trainer(job, run_dir)


def losses(job: JobSpec, run_dir: Path) -> list[float | None]:
    """The loss of each step of a run of one rank."""
    return [record["loss"] for record in trainer_of(job, run_dir).run()]
