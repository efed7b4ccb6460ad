"""The objective of the toy family: each token predicts the one after the next.

By hand: the packed tokens 5 6 7 8 9 and seq_length 4 give tokens [begin] 5 6 7 and targets 6 7 8 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpctl.train.data.samples import SampleSource

from .family import BEGIN


class ToySamples:
    """tokens, targets int64 [b, s] and weights float64 [b, s], 1 / s."""

    def __init__(self, source: SampleSource) -> None:
        self.dataset, self.begin = source.dataset, source.special[BEGIN]
        self.packed = source.packed(source.model.seq_length)
        self.samples_per_epoch = self.packed.samples_per_epoch

    def batch(self, numbers: Sequence[int]) -> dict[str, Any]:
        """The samples of these numbers."""
        text = self.packed.batch(numbers)
        targets = text[:, 1:]
        begin = np.full((len(text), 1), self.begin, np.int64)
        tokens = np.concatenate((begin, text[:, :-2]), axis=1)
        return {"tokens": tokens, "targets": targets, "weights": np.full(targets.shape, 1 / targets.shape[1])}
