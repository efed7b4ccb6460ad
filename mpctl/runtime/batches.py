"""Which tokens a rank sees: a function of seed, step and its data-parallel coordinate alone.

All tensor-parallel ranks of a replica read the same samples; together the replicas read the same
global batch under every layout (data/samples.py states the law).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from mpctl.data.manifest import open_prepared
from mpctl.data.samples import PackedSamples, sample_numbers
from mpctl.errors import InputError
from mpctl.families.batch import Batch
from mpctl.kernels.context import context_split
from mpctl.kernels.group import Group
from mpctl.spec.job import JobSpec


class Batches:
    """Micro batches of training steps, and those of a validation."""

    def __init__(
        self, job: JobSpec, data: Path, *, dp: Group, cp: Group, device: torch.device
    ) -> None:
        assert job.model is not None
        self.job, self.dp, self.cp, self.device = job, dp, cp, device
        self.vocab = job.model.vocab
        prepared, length = open_prepared(data), job.model.seq_length
        seed, wanted = job.training.seed, job.training.eval_samples
        self.train = PackedSamples(prepared.train.open(), length, seed)
        self.validation = None
        if wanted:
            held = PackedSamples(prepared.validation.open(), length, seed, shuffle=False)
            self.validation = held
            self.eval_samples = min(wanted, held.samples_per_epoch)

    def step(self, step: int) -> Iterator[Batch]:
        """This rank's micro batches of one training step."""
        training = self.job.training
        for micro_batch in range(self.job.num_microbatches):
            numbers = sample_numbers(
                step=step,
                micro_batch=micro_batch,
                micro_batch_size=training.micro_batch_size,
                dp_rank=self.dp.rank,
                dp_size=self.dp.size,
                global_batch_size=training.global_batch_size or training.micro_batch_size,
            )
            yield self._batch(self.train, list(numbers))

    def evaluation(self) -> Iterator[Batch]:
        """This rank's share of the same validation samples every time."""
        if self.validation is None:
            return
        own = range(self.dp.rank, self.eval_samples, self.dp.size)
        size = self.job.training.micro_batch_size
        for start in range(0, len(own), size):
            yield self._batch(self.validation, list(own[start : start + size]))

    def _batch(self, samples: PackedSamples, numbers: list[int]) -> Batch:
        tokens = torch.from_numpy(samples.batch(numbers))
        if int(tokens.max()) >= self.vocab:
            raise InputError.of(
                "token-outside-vocabulary", "data",
                f"token {int(tokens.max())} in {samples.dataset.prefix} is outside the model's "
                f"vocabulary of {self.vocab}", "prepare the data with the model's vocabulary",
            )  # fmt: skip
        tokens = tokens.to(self.device)
        inputs, targets = (context_split(t, self.cp) for t in (tokens[:, :-1], tokens[:, 1:]))
        return Batch(inputs.contiguous(), targets.contiguous(), torch.tensor(numbers))
