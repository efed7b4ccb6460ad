"""GPT's objective: each token predicts the next one, everywhere with the same weight.

By hand: the packed tokens 5 6 7 8 9 and seq_length 4 give tokens 5 6 7 8 and targets 6 7 8 9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpctl.data.indexed import IndexedDataset
from mpctl.data.samples import Fields, PackedSamples
from mpctl.spec.model import ModelSpec


class GptSamples:
    """tokens and targets, int64 [b, s]: functions of the seed and the samples' numbers alone."""

    def __init__(
        self,
        dataset: IndexedDataset,
        model: ModelSpec,
        *,
        seed: int,
        special: Mapping[str, int],
        words: int,
        shuffle: bool = True,
    ) -> None:
        self.dataset = dataset
        self.packed = PackedSamples(dataset, model.seq_length, seed, shuffle)
        self.samples_per_epoch = self.packed.samples_per_epoch

    def batch(self, numbers: Sequence[int]) -> Fields:
        text = self.packed.batch(numbers)
        return {"tokens": text[:, :-1], "targets": text[:, 1:]}
