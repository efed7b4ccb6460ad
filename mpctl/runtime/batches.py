"""Which samples a rank sees: a function of seed, step and its data-parallel coordinate alone.

All tensor-parallel ranks of a replica read the same samples; together the replicas read the same
global batch under every layout (data/samples.py states the law). What a sample is, its family says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mpctl.data.indexed import IndexedDataset
from mpctl.data.manifest import Prepared, Split, open_prepared, open_validations
from mpctl.data.samples import SampleSource, sample_numbers
from mpctl.data.special import added_tokens, missing_tokens, special_ids
from mpctl.errors import InputError
from mpctl.families import get_family, special_tokens
from mpctl.families.batch import Batch, Objective
from mpctl.families.modules import get_implementation
from mpctl.kernels.context import context_split
from mpctl.sharding import validation_batches
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.transport.group import Group


class DatasetBatches:
    """Micro batches of training steps, and those of a validation."""

    def __init__(
        self, job: JobSpec, data: Path, *, dp: Group, cp: Group, device: torch.device
    ) -> None:
        assert job.model is not None
        self.job, self.dp, self.cp, self.device = job, dp, cp, device
        self.model = job.model
        prepared = self.prepared = open_prepared(data)
        self.added = added_tokens(prepared.tokenizer_path)  # one tokenizer for every corpus
        self.train = self._objective(prepared, prepared.train, shuffle=True)
        self.validation = None
        if job.training.eval_samples:
            held = self._objective(prepared, prepared.validation, shuffle=False)
            self.validation = held
        folders = {name: Path(folder) for name, folder in job.data.validation.items()}
        others = open_validations(prepared, folders if self.validation else {})
        self.validations = {
            name: self._objective(other, other.validation, shuffle=False)
            for name, other in others.items()
        }

    @property
    def reserved(self) -> int:
        """Special tokens that take ids which the tokenizer leaves free."""
        assert self.job.model is not None
        return len(missing_tokens(self.added, special_tokens(self.job.model)))

    def eval_samples(self, held: Objective) -> int:
        return min(self.job.training.eval_samples, held.samples_per_epoch)

    def _objective(self, prepared: Prepared, split: Split, *, shuffle: bool) -> Objective:
        return make_objective(
            split.open(), self.job, self.added, words=prepared.tokenizer_vocab_size,
            shuffle=shuffle,
        )  # fmt: skip

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

    def evaluation(self, held: Objective) -> tuple[list[Batch], int]:
        """This replica's share of the same validation samples every time: its micro batches, and
        how many of them count. One that does not count is of sample 0: it lets a replica without
        samples of its own take part in what all replicas do."""
        numbers = validation_batches(
            self.eval_samples(held), micro_batch=self.job.training.micro_batch_size,
            parts=self.dp.size, index=self.dp.rank,
        )  # fmt: skip
        batches = [self._batch(held, list(own) or [0]) for own in numbers]
        return batches, sum(len(own) > 0 for own in numbers)

    def _batch(self, samples: Objective, numbers: list[int]) -> Batch:
        return read_batch(samples, numbers, model=self.model, cp=self.cp, device=self.device)


def make_objective(
    dataset: IndexedDataset, job: JobSpec, added: Mapping[str, int], *, words: int, shuffle: bool
) -> Objective:
    """Samples of a dataset as the job's family takes them.

    added: the tokenizer's added tokens by name; words: ids that its text may use.
    """
    model = job.model
    assert model is not None
    special = special_ids(added, special_tokens(model), vocab=model.vocab, words=words)
    source = SampleSource(dataset, model, job.training.seed, special, words, shuffle)
    return get_implementation(model.family).samples(source)


def read_batch(
    samples: Objective, numbers: list[int], *, model: ModelSpec, cp: Group, device: torch.device
) -> Batch:
    """The samples of these numbers on this rank's device: its part of each sequence, [b, s/c].

    InputError where a token is not below the model's vocabulary.
    """
    fields = {name: torch.from_numpy(a) for name, a in samples.batch(numbers).items()}
    for name, array in get_family(model.family).batch_arrays.items():
        if array.is_tokens and (token := int(fields[name].max())) >= model.vocab:
            raise InputError.of(
                "token-outside-vocabulary", "data",
                f"token {token} in {samples.dataset.prefix} is outside the model's vocabulary of "
                f"{model.vocab}", "prepare the data with the model's vocabulary",
            )  # fmt: skip
    held = {name: _held(field, cp, device) for name, field in fields.items()}
    return Batch(torch.tensor(numbers), held)


def _held(field: Tensor, cp: Group, device: torch.device) -> Tensor:
    """[b, s] -> [b, s/c] on this rank's device; [b] as it is."""
    field = field.to(device)
    return context_split(field, cp).contiguous() if field.dim() > 1 else field
