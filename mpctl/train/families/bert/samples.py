"""BERT's objectives: masked tokens and next sentence (arXiv 1810.04805, section 3.1, task 1 and 2).

A sample is [CLS] A [SEP] B [SEP], exactly s tokens, s - 3 of them text. The token stream knows no
sentences, so packed text is cut in two at a random place; B is what follows A in every second
sample on average, and else the same stretch of another sample of the epoch, drawn at random.
15 % of the text's tokens, rounded, are predicted: a fixed count, no place twice, never a special
one. Each on its own becomes [MASK] (80 %), a random id of the text's (10 %) or stays (10 %).
By hand: s = 23 holds 20 text tokens, 3 of them predicted with weight 1/3 each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpctl.core.errors import InputError
from mpctl.model.families.bert.family import CLS, MASK, SEP, SPECIAL_PLACES
from mpctl.train.data.samples import Fields, SampleSource, choose, draw, integers, require_length, stack

Tokens = NDArray[np.int64]
PAIR, PLACES, MASKS = 1, 2, 3  # purposes of random words (train/data/samples.py)
MASKED_TENTHS, RANDOM_TENTHS = 8, 1  # of what is predicted; the tenth that is left stays


def predicted_count(text: int) -> int:
    """15 % of the text's tokens, a half rounded up, at least one: 3 of 20, 19 of 125."""
    return max(1, (15 * text + 50) // 100)


class BertSamples:
    """tokens, types and targets int64 [b, s], weights float64 [b, s], next int64 [b].

    types is 0 up to the first [SEP], then 1. targets are the tokens before masking; weights are
    1 / predicted where a token is to be predicted and 0 elsewhere. next is 1 when B is from
    elsewhere. InputError when the data holds fewer than two samples.
    """

    def __init__(self, source: SampleSource) -> None:
        require_length(source.model.seq_length, least=5, holds="[CLS] A [SEP] B [SEP]")
        self.dataset, self.seed = source.dataset, source.seed
        self.special, self.words = source.special, source.words
        self.text = source.model.seq_length - SPECIAL_PLACES
        self.packed = source.packed(self.text)
        self.samples_per_epoch = self.packed.samples_per_epoch
        if self.samples_per_epoch < 2:
            tokens = self.dataset.tokens
            raise InputError.of(
                "samples-too-few-tokens",
                str(self.dataset.prefix),
                f"{tokens} tokens do not fill two samples of {self.text}, and a pair of texts that "
                "do not belong together takes both",
                f"use a sequence length of {(tokens - 1) // 2 + SPECIAL_PLACES} or less, or prepare more text",
            )

    def batch(self, numbers: Sequence[int]) -> Fields:
        """The samples of these numbers, as the class says; a sample depends on its number alone."""
        return stack(self._sample(number) for number in numbers)

    def _sample(self, number: int) -> dict[str, Any]:
        coin, place, jump = (int(word) for word in draw(self.seed, number, PAIR, 3))
        cut, is_other = 1 + place % (self.text - 1), coin % 2
        first = second = self._text(number)
        if is_other:
            second = self._text(self._other(number, jump))
        cls, sep = [self.special[CLS]], [self.special[SEP]]
        targets = np.concatenate((cls, first[:cut], sep, second[cut:], sep))
        places = self._places(number, cut)
        return {
            "tokens": self._masked(number, targets, places),
            "types": (np.arange(len(targets)) > 1 + cut).astype(np.int64),
            "targets": targets,
            "weights": _weights(len(targets), places),
            "next": np.int64(is_other),
        }

    def _text(self, number: int) -> Tokens:
        return self.packed.sample(number)[:-1]

    def _other(self, number: int, jump: int) -> int:
        """Any other sample of the same epoch: 1 to n - 1 further on, around its end."""
        n = self.samples_per_epoch
        epoch, i = divmod(number, n)
        return epoch * n + (i + 1 + jump % (n - 1)) % n

    def _places(self, number: int, cut: int) -> Tokens:
        """Return the predicted places of the s: text begins after [CLS], [SEP] lies at the cut."""
        words = draw(self.seed, number, PLACES, self.text)
        chosen = choose(words, predicted_count(self.text))
        return 1 + chosen + (chosen >= cut)

    def _masked(self, number: int, targets: Tokens, places: Tokens) -> Tokens:
        words = draw(self.seed, number, MASKS, 2 * len(places))
        tenths = integers(words[: len(places)], 10)
        is_mask = tenths < MASKED_TENTHS
        is_random = ~is_mask & (tenths < MASKED_TENTHS + RANDOM_TENTHS)
        random = integers(words[len(places) :], self.words)
        tokens = targets.copy()
        tokens[places[is_mask]] = self.special[MASK]
        tokens[places[is_random]] = random[is_random]
        return tokens


def _weights(length: int, places: Tokens) -> NDArray[np.float64]:
    weights = np.zeros(length)
    weights[places] = 1 / len(places)
    return weights
