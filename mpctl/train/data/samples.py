"""Samples of fixed length from documents of any length: pack, shuffle, shard. All of it follows
from (seed, epoch, number), nothing from the layout, so that every layout trains on the same data.

An epoch puts the documents in a shuffled order, end to end, T tokens in all, and cuts
floor((T - 1) / s) samples of s + 1 tokens that overlap by one: inputs are [:-1], targets [1:].
T = 10, s = 4 gives samples of tokens 0..4 and 4..8; token 9 waits for another epoch.
Rank r of dp takes, in micro batch j of step k, the b samples from k*G + j*dp*b + r*b on.
Permutations are stable sorts of Philox's raw 64-bit words (Salmon et al. 2011), keyed by
(seed, epoch): NumPy promises that stream for good, but not that of Generator.permutation.

What a family draws for a sample (masks, spans, blanks) is a stateless function of (seed, sample
number, purpose): the words of Philox4x64, key [seed, number], counter [0, 0, 0, purpose]. The
purpose, from 1 on, is the counter's highest word, so the streams of two purposes never overlap, nor
do they meet the epochs' permutations, which count from 0. Each family numbers the purposes of its
samples itself, and never changes a number: it would change the data of old runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpctl.core.errors import InputError
from mpctl.spec.model import ModelSpec
from mpctl.train.data.indexed import IndexedDataset

EPOCHS_KEPT = 2
Fields = dict[str, NDArray[Any]]
"""A batch as an objective makes it: arrays by name, the batch dimension first in each."""


@dataclass(frozen=True)
class SampleSource:
    """Source of the samples that a family makes.

    dataset: tokens of one split of prepared data. special: ids of the family's special tokens by
    name. words: text uses the ids range(words) of the model's vocabulary. shuffle: whether each
    epoch takes the documents in a new order, as training does and validation does not.
    """

    dataset: IndexedDataset
    model: ModelSpec
    seed: int
    special: Mapping[str, int]
    words: int
    shuffle: bool = True

    def packed(self, seq_length: int) -> PackedSamples:
        """Samples of seq_length + 1 tokens each, cut from the documents end to end."""
        return PackedSamples(self.dataset, seq_length, self.seed, self.shuffle)


def sample_numbers(
    *, step: int, micro_batch: int, micro_batch_size: int, dp_rank: int, dp_size: int, global_batch_size: int
) -> range:
    """Global numbers of the samples of one micro batch on one data-parallel rank; step from 0.

    >>> sizes = {"micro_batch_size": 2, "dp_size": 2, "global_batch_size": 8}
    >>> [list(sample_numbers(step=0, micro_batch=j, dp_rank=1, **sizes)) for j in (0, 1)]
    [[2, 3], [6, 7]]
    """
    per_micro_batch = dp_size * micro_batch_size
    if global_batch_size % per_micro_batch:
        raise ValueError(f"{global_batch_size} samples in micro batches of {per_micro_batch}")
    if not (0 <= dp_rank < dp_size and 0 <= micro_batch < global_batch_size // per_micro_batch):
        raise ValueError(f"rank {dp_rank} of {dp_size}, micro batch {micro_batch}: out of range")
    first = step * global_batch_size + micro_batch * per_micro_batch + dp_rank * micro_batch_size
    return range(first, first + micro_batch_size)


def stack(samples: Iterable[Mapping[str, ArrayLike]]) -> Fields:
    """Samples with the same fields as one batch: [s] each becomes [b, s], a number each [b]."""
    rows = list(samples)
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def require_length(seq_length: int, *, least: int, holds: str) -> None:
    """InputError when a sequence is too short for the smallest sample of an objective."""
    if seq_length < least:
        message = f"{seq_length} tokens do not hold {holds}"
        raise InputError.of("seq-length-too-short", "model.seq_length", message, f"use {least} or more")


@dataclass(frozen=True, slots=True)
class _Epoch:
    documents: NDArray[np.int64]  # [documents], in this epoch's order
    bounds: NDArray[np.int64]  # [documents + 1], where they begin and end, end to end
    samples: NDArray[np.int64]  # [samples], the cut that each number selects


class PackedSamples:
    """Samples of `seq_length` + 1 tokens of a dataset, epoch after epoch without end.

    InputError when the dataset is too small for one sample. Not safe for threads.
    """

    def __init__(self, dataset: IndexedDataset, seq_length: int, seed: int, shuffle: bool = True) -> None:
        assert seq_length > 0 and 0 <= seed < 2**64, f"seq_length {seq_length}, seed {seed}"
        if dataset.tokens < seq_length + 1:
            raise InputError.of(
                "samples-too-few-tokens",
                str(dataset.prefix),
                f"{dataset.tokens} tokens do not fill one sample of {seq_length} + 1",
                f"use a sequence length below {dataset.tokens}, or prepare more text",
            )
        self.dataset = dataset
        self.seq_length = seq_length
        self.seed = seed
        self.shuffle = shuffle
        self.samples_per_epoch = (dataset.tokens - 1) // seq_length
        self._epochs: dict[int, _Epoch] = {}

    def sample(self, number: int) -> NDArray[np.int64]:
        """Sample `number` >= 0 of the endless sequence: token ids, int64 [s + 1]."""
        if number < 0:
            raise IndexError(f"sample {number}")
        epoch_number, i = divmod(number, self.samples_per_epoch)
        epoch = self._epoch(epoch_number)
        return self._tokens(epoch, int(epoch.samples[i]) * self.seq_length)

    def batch(self, numbers: Iterable[int]) -> NDArray[np.int64]:
        return np.stack([self.sample(number) for number in numbers])

    def _tokens(self, epoch: _Epoch, position: int) -> NDArray[np.int64]:
        """The s + 1 tokens of the epoch from `position` on, across document ends."""
        stop = position + self.seq_length + 1
        index = int(np.searchsorted(epoch.bounds, position, side="right")) - 1
        pieces: list[NDArray[np.int64]] = []
        while position < stop:
            begin, end = int(epoch.bounds[index]), min(stop, int(epoch.bounds[index + 1]))
            document = int(epoch.documents[index])
            pieces.append(self.dataset.document(document, position - begin, end - begin))
            position, index = end, index + 1
        return np.concatenate(pieces).astype(np.int64)

    def _epoch(self, number: int) -> _Epoch:
        """Tables of an epoch; the last two stay, as a batch may straddle the border."""
        epoch = self._epochs.pop(number, None) or self._make_epoch(number)
        self._epochs[number] = epoch
        while len(self._epochs) > EPOCHS_KEPT:
            del self._epochs[next(iter(self._epochs))]
        return epoch

    def _make_epoch(self, number: int) -> _Epoch:
        lengths = self.dataset.document_lengths
        documents = np.arange(len(lengths))
        samples = np.arange(self.samples_per_epoch)
        if self.shuffle:
            words = np.random.Philox(key=np.array([self.seed, number], np.uint64))
            documents = np.argsort(words.random_raw(len(documents)), kind="stable")
            samples = np.argsort(words.random_raw(len(samples)), kind="stable")
        bounds = np.concatenate(([0], np.cumsum(lengths[documents])))
        return _Epoch(documents, bounds, samples)


Words = NDArray[np.uint64]


def draw(seed: int, number: int, purpose: int, count: int) -> Words:
    """The first `count` words of the stream, uint64 [count]; seed and number below 2^64."""
    key = np.array([seed, number], np.uint64)
    counter = np.array([0, 0, 0, purpose], np.uint64)
    return np.random.Philox(counter=counter, key=key).random_raw(count)


def integers(words: Words, bound: int) -> NDArray[np.int64]:
    """An integer of range(bound) for each word: the remainder, whose distribution is uniform but
    for less than bound / 2^64.

    >>> integers(np.array([30, 10, 20], np.uint64), 7).tolist()
    [2, 3, 6]
    """
    return (words % np.uint64(bound)).astype(np.int64)


def choose(words: Words, count: int) -> NDArray[np.int64]:
    """`count` different indices of range(len(words)) in random order, int64 [count].

    >>> choose(np.array([30, 10, 20], np.uint64), 3).tolist()
    [1, 2, 0]
    """
    return np.argsort(words, kind="stable")[:count].astype(np.int64)


def compose(words: Words, parts: int) -> NDArray[np.int64]:
    """len(words) + 1 as a sum of `parts` positive terms, every way as likely, int64 [parts].

    Three words make 4, in two parts 1 + 3, 2 + 2 or 3 + 1: one of three places is cut.
    """
    assert 0 < parts <= len(words) + 1, f"{len(words) + 1} in {parts} parts"
    cuts = np.sort(choose(words, parts - 1)) + 1
    return np.diff(np.concatenate(([0], cuts, [len(words) + 1])))
