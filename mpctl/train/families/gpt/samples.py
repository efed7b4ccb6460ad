"""GPT's objective: each token predicts the next one, everywhere with the same weight."""

from __future__ import annotations

from collections.abc import Sequence

from mpctl.train.data.samples import Fields, SampleSource


class GptSamples:
    """tokens and targets, int64 [b, s]: functions of the seed and the samples' numbers alone."""

    def __init__(self, source: SampleSource) -> None:
        self.dataset = source.dataset
        self.packed = source.packed(source.model.seq_length)
        self.samples_per_epoch = self.packed.samples_per_epoch

    def batch(self, numbers: Sequence[int]) -> Fields:
        """The samples of these numbers, as the class says; a sample depends on its number alone."""
        text = self.packed.batch(numbers)
        return {"tokens": text[:, :-1], "targets": text[:, 1:]}
