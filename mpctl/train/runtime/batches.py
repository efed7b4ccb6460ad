"""Samples of a rank: a function of seed, step and its data-parallel coordinate alone.

All tensor-parallel ranks of a replica read the same samples; together the replicas read the same
global batch under every layout (train/data/samples.py has the formula). The model family's objective
decides what a sample consists of.

A thread may read future steps in advance (`ReadAhead`), since the items of a step are a function of
its number. If a step other than the next one is requested, for example one that is computed again,
reading restarts at that step. An error is raised when its item is requested, not before.

Letters: b micro batch size, s sequence, c ranks of context parallelism.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Condition, Thread
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpctl.core.errors import InputError
from mpctl.core.sharding import filled_up, validation_batches
from mpctl.model.families import get_family, special_tokens
from mpctl.model.layout.topology import job_grid
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.train.data.chat_samples import ChatSamples, find_rows
from mpctl.train.data.extend import TokenizerExtension
from mpctl.train.data.indexed import IndexedDataset
from mpctl.train.data.manifest import Prepared, Split, open_prepared, open_validations
from mpctl.train.data.samples import Fields, SampleSource, sample_numbers
from mpctl.train.data.tokenizer import added_tokens, missing_tokens, special_ids
from mpctl.train.families.implementation import Batch, Objective, get_implementation
from mpctl.train.layers.context_parallel import context_blocks
from mpctl.train.layers.cross_entropy import IGNORED
from mpctl.train.runtime.mesh import AxisPosition
from mpctl.train.transport.group import Group

Item = TypeVar("Item")


@dataclass(frozen=True)
class _Failure:
    """An error that reading an item raised; takes the item's place in the queue."""

    error: BaseException


@dataclass(frozen=True)
class _End:
    """The step has no more items."""


class ReadAhead(Generic[Item]):
    """Reads the items of steps `0 .. stop` in a separate thread, which the first use starts.

    read: returns the items of a step, given its number; only the thread calls it. depth: how many
    items are read ahead.
    """

    def __init__(self, read: Callable[[int], Iterator[Item]], *, stop: int, depth: int) -> None:
        self.read, self.stop, self.depth = read, stop, depth
        self.next_step: int | None = None  # the step whose items the thread returns next
        self._items: deque[Item | _Failure | _End] = deque()
        self._changed, self._is_closed = Condition(), False
        self._thread: Thread | None = None

    def step(self, number: int) -> Iterator[Item]:
        """The items of step `number`; waits for those that are not read yet, and raises the errors
        that reading them raised."""
        if number != self.next_step:
            self._start(number)
        self.next_step = None  # until this step is over
        while not isinstance(item := self._take(), _End):
            if isinstance(item, _Failure):
                self.close()
                raise item.error
            yield item
        self.next_step = number + 1 if number + 1 < self.stop else None

    def close(self) -> None:
        """End the thread, after the item that it is reading."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._thread, self.next_step = None, None

    def _start(self, number: int) -> None:
        self.close()
        self._items.clear()
        self._is_closed = False
        self._thread = Thread(target=self._run, args=(number,), name="reading", daemon=True)
        self._thread.start()

    def _run(self, first: int) -> None:
        try:
            for number in range(first, max(self.stop, first + 1)):
                for item in self.read(number):
                    if not self._put(item):
                        return
                self._put(_End())
        except BaseException as error:
            self._put(_Failure(error))

    def _put(self, item: Item | _Failure | _End) -> bool:
        """Queue an item once there is room; returns whether more items are wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._items) < self.depth)
            self._items.append(item)
            self._changed.notify_all()
            return not self._is_closed

    def _take(self) -> Item | _Failure | _End:
        with self._changed:
            self._changed.wait_for(lambda: self._items)
            item = self._items.popleft()
            self._changed.notify_all()
            return item


HostBatch = tuple[list[int], Fields]
"""The numbers of a micro batch's samples, and its arrays in host memory."""


@dataclass(frozen=True)
class Batches:
    """Micro batches of training steps and of validations, for one rank.

    train: the objective that produces training samples. validation: that of the data's validation
    split, None if the job does not validate; validations: those of additional corpora, by name.
    extension: what the data's tokenizer added to an older tokenizer; reserved_ids: number of
    special tokens whose ids the tokenizer does not use. reads_ahead: whether a thread reads
    training samples in advance; on a CPU it would compete with the computation.
    """

    job: JobSpec
    dp: AxisPosition
    cp: Group
    device: torch.device
    train: Objective
    validation: Objective | None = None
    validations: Mapping[str, Objective] = field(default_factory=dict)
    extension: TokenizerExtension | None = None
    reserved_ids: int = 0
    reads_ahead: bool = False

    @classmethod
    def open(cls, job: JobSpec, *, data: Path, dp: AxisPosition, cp: Group, device: torch.device) -> Batches:
        """Read the prepared data in the folder `data` and the validation corpora of the job.

        Raises InputError where prepared data is missing or damaged.
        """
        prepared = open_prepared(data)
        added = added_tokens(prepared.tokenizer_path)  # one tokenizer for every corpus

        def objective(corpus: Prepared, split: Split, *, shuffle: bool) -> Objective:
            words, together = corpus.tokenizer_vocab_size, job.training.eval_samples
            if shuffle:
                together = job.training.global_batch_size or job.training.micro_batch_size
            return make_objective(split.open(), job, added, words=words, together=together, shuffle=shuffle)

        train = objective(prepared, prepared.train, shuffle=True)
        validates = job.training.eval_samples > 0
        folders = {name: Path(folder) for name, folder in job.data.validation.items()}
        validation = objective(prepared, prepared.validation, shuffle=False) if validates else None
        corpora = open_validations(prepared, folders if validates else {})
        return cls(
            job,
            dp,
            cp,
            device,
            train=train,
            validation=validation,
            validations={name: objective(corpus, corpus.validation, shuffle=False) for name, corpus in corpora.items()},
            extension=prepared.extension,
            reads_ahead=device.type == "cuda",
            reserved_ids=len(missing_tokens(added, special_tokens(model_of(job)))),
        )

    def eval_samples(self, objective: Objective) -> int:
        """Number of samples of a validation by `objective`: `training.eval_samples`, or all."""
        return min(self.job.training.eval_samples, objective.samples_per_epoch)

    def training_step(self, step: int) -> Iterator[Batch]:
        """This rank's micro batches of training step `step`, counted from 0. The number of the
        batch is higher than that of the step if batches were skipped before
        (training.skip_batches)."""
        read = self._read_step if self._reader is None else self._reader.step
        for numbers, fields in read(step):
            yield sent_batch(numbers, fields, self.device)

    def close(self) -> None:
        """End the thread that reads in advance."""
        if self._reader is not None:
            self._reader.close()

    @cached_property
    def _reader(self) -> ReadAhead[HostBatch] | None:
        """The read-ahead thread: it holds the micro batches of this step and the next."""
        if not self.reads_ahead:
            return None
        depth = 2 * self.job.num_microbatches
        return ReadAhead(self._read_step, stop=self.job.training.steps, depth=depth)

    def _read_step(self, step: int) -> Iterator[HostBatch]:
        training = self.job.training
        batch, model = training.batch_of_step(step + 1) - 1, model_of(self.job)
        for microbatch in range(self.job.num_microbatches):
            numbers = sample_numbers(
                step=batch,
                micro_batch=microbatch,
                micro_batch_size=training.micro_batch_size,
                dp_rank=self.dp.rank,
                dp_size=self.dp.size,
                global_batch_size=training.global_batch_size or training.micro_batch_size,
            )
            yield list(numbers), host_fields(self.train, list(numbers), model=model, cp=self.cp)

    def evaluation(self, objective: Objective) -> tuple[list[Batch], int]:
        """This replica's micro batches of the validation samples, the same at every call, and how
        many of them count. A micro batch that does not count repeats sample 0: with it, a replica
        that has no samples can still take part in collectives. If tensor-parallel ranks cannot
        split a micro batch evenly, it is padded with copies of its first sample, of loss 0."""
        numbers = validation_batches(
            self.eval_samples(objective),
            micro_batch=self.job.training.micro_batch_size,
            parts=self.dp.size,
            index=self.dp.rank,
        )
        parts = job_grid(self.job).sample_parts
        batches = []
        for own in (list(rank_numbers) or [0] for rank_numbers in numbers):
            copies = own[:1] * (filled_up(len(own), parts=parts) - len(own))
            batch = self._batch(objective, own + copies)
            batches.append(_without_targets(batch, len(copies)) if copies else batch)
        return batches, sum(len(rank_numbers) > 0 for rank_numbers in numbers)

    def _batch(self, objective: Objective, numbers: list[int]) -> Batch:
        model = model_of(self.job)
        return read_batch(objective, numbers, model=model, cp=self.cp, device=self.device)


def _without_targets(batch: Batch, count: int) -> Batch:
    """The batch with every target of its last `count` samples ignored."""
    targets = batch["targets"].clone()  # tokens may be the same memory
    targets[-count:] = IGNORED
    return Batch(batch.samples, {**batch.fields, "targets": targets})


def model_of(job: JobSpec) -> ModelSpec:
    """The job's model. Raises InputError if the job names none."""
    if job.model is None:
        raise InputError.of("no-model", "model", "a run needs a model", "name one: model")
    return job.model


def make_objective(
    dataset: IndexedDataset, job: JobSpec, added: Mapping[str, int], *, words: int, together: int, shuffle: bool
) -> Objective:
    """The training objective of the job's model family over a dataset, or that of chat data.

    added: the tokenizer's added tokens by name; words: number of ids that text may use; together: number of samples
    whose losses are averaged, at most all of an epoch unless they are shuffled.
    """
    model, chat = model_of(job), job.data.chat
    if (rows := find_rows(dataset, model.seq_length)) is not None:
        is_packed = chat is not None and chat.is_packed
        return ChatSamples(rows, seed=job.training.seed, together=together, is_packed=is_packed, shuffle=shuffle)
    special = special_ids(added, special_tokens(model), vocab=model.vocab, words=words)
    source = SampleSource(dataset, model, job.training.seed, special, words, shuffle)
    return get_implementation(model.family).samples(source)


def read_batch(objective: Objective, numbers: list[int], *, model: ModelSpec, cp: Group, device: torch.device) -> Batch:
    """The samples with these numbers on `device`: `host_fields`, copied there."""
    return sent_batch(numbers, host_fields(objective, numbers, model=model, cp=cp), device)


def host_fields(objective: Objective, numbers: list[int], *, model: ModelSpec, cp: Group) -> Fields:
    """The samples with these numbers as NumPy arrays by name. Arrays [b, s] are cut to this rank's
    part [b, s/c], others are not cut. Raises InputError if a token id is not below the vocabulary
    size."""
    fields = objective.batch(numbers)
    for name, array in get_family(model.family).batch_arrays.items():
        if array.is_tokens and (largest := int(fields[name].max())) >= model.vocab:
            raise InputError.of(
                "token-outside-vocabulary",
                "data",
                f"token {largest} in {objective.dataset.prefix} is outside the model's vocabulary of {model.vocab}",
                "prepare the data with the model's vocabulary",
            )
    return {name: _local_part(whole, cp) for name, whole in fields.items()}


def _local_part(whole: NDArray[Any], cp: Group) -> NDArray[Any]:
    """[b, s] -> [b, s/c]; [b] is returned unchanged."""
    if whole.ndim == 1 or cp.size == 1:
        return whole
    blocks = context_blocks(whole.shape[1], cp.size, cp.rank)
    return np.concatenate([whole[:, block.start : block.stop] for block in blocks], axis=1)


def sent_batch(numbers: list[int], fields: Fields, device: torch.device) -> Batch:
    """Copy a micro batch to `device` in one transfer: all of its arrays share one buffer. For an
    accelerator the buffer is pinned, and the host does not wait for the copy."""
    arrays = {"": np.array(numbers), **fields}
    pinned = device.type != "cpu"
    total = sum(array.size for array in arrays.values())
    host = torch.empty(total, dtype=torch.int64, pin_memory=pinned)
    for part, array in zip(_views(host, arrays), arrays.values(), strict=True):
        part.copy_(torch.from_numpy(array))
    whole = host.to(device, non_blocking=True)
    samples, *local = _views(whole, arrays)
    return Batch(samples, dict(zip(fields, local, strict=True)))


def _views(whole: Tensor, arrays: Mapping[str, NDArray[Any]]) -> list[Tensor]:
    """Consecutive parts of the buffer in the shapes of the arrays: int64, or float64 for weights,
    as an Objective makes them."""
    parts = whole.split([array.size for array in arrays.values()])
    kinds = [torch.float64 if a.dtype.kind == "f" else torch.int64 for a in arrays.values()]
    return [part.view(kind).view(array.shape) for part, kind, array in zip(parts, kinds, arrays.values(), strict=True)]
