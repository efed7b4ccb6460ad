"""GLM's objective: autoregressive blank infilling (arXiv 2103.10360, section 2.1, figure 2).

Part A is the text with each span as one [MASK]; part B holds the spans in random order, read as
[sop] and the span, written as the span and [eop]. A sees A both ways, B sees A and B's past. By
hand, x1 to x6 with the spans x3 and x5 x6, the second written first (positions are from 0 here):

    tokens     x1 x2 M x4 M | S  x5 x6 S  x3
    targets                 | x5 x6 E  x3 E
    positions  0  1  2 3  4 | 4  4  4  2  2      where the span's [MASK] stands in A
    blocks     0  0  0 0  0 | 1  2  3  1  2      within the span

Lengths of spans are Poisson of mean 3, without 0 (a blank of nothing) and no longer than 20 (one
in 10^11) or half a sequence; they are drawn until 15 % of the text are covered. n tokens of text
with k spans take n + 2k, so a sample keeps as much of its packed text as fits with its own spans.
The packed length is what fits with spans of 3: of s = 512, over 1000 samples, 0.7 % are padding
(16 tokens at most) and 0.2 % of the packed text stays unread; of s = 16, 1.3 % and 4 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import factorial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpctl.model.families.glm.family import END, MASK, START, text_length
from mpctl.train.data.samples import Fields, SampleSource, choose, draw, require_length, stack

Tokens = NDArray[np.int64]
LENGTHS, PLACES, ORDER = 6, 7, 8  # purposes of random words (train/data/samples.py)
MEAN_SPAN = 3
LONGEST_SPAN = 20


def length_thresholds(longest: int) -> NDArray[np.uint64]:
    """The word from which on a span is longer than 1, 2, ..: the inverse of the distribution.

    Exact: 3^l / l! over its sum, times 2^64. By hand: of 1 and 2 (3 and 4.5 in 7.5) 2/5 are 1.
    """
    chances = [Fraction(MEAN_SPAN**length, factorial(length)) for length in range(1, longest + 1)]
    shares = [total / sum(chances) for total in accumulate(chances)][:-1]
    return np.array([int(share * 2**64) for share in shares], np.uint64)


def fitting(lengths: Tokens, *, text: int, seq_length: int) -> tuple[int, int]:
    """Return the number of the `text` tokens to keep, and of the spans that cover 15 % of them."""
    texts = np.arange(1, text + 1)
    spans = np.searchsorted(20 * np.cumsum(lengths), 3 * texts) + 1
    kept = int(np.count_nonzero(texts + 2 * spans <= seq_length))  # the sums only grow
    return kept, int(spans[kept - 1])


@dataclass(frozen=True, slots=True)
class Blanks:
    """Spans in the order of the text, [k] each: where its [MASK] stands in A, and its length."""

    masks: Tokens
    lengths: Tokens

    @property
    def starts(self) -> Tokens:
        """Start of each span in the text."""
        before = np.cumsum(self.lengths) - self.lengths
        return self.masks - np.arange(len(self.masks)) + before

    def part_a(self, text: Tokens, mask: int) -> Tokens:
        """text [n], without the spans and with their [MASK]s."""
        is_kept = np.ones(len(text), bool)
        stops = self.starts + self.lengths
        for start, stop in zip(self.starts, stops, strict=True):
            is_kept[start:stop] = False
        return np.insert(text[is_kept], self.masks - np.arange(len(self.masks)), mask)

    def part_b(self, text: Tokens, order: Tokens, *, start: int, end: int) -> dict[str, Tokens]:
        """Fields of the spans in this order, [covered + k] each."""
        sizes = self.lengths[order] + 1
        first = np.repeat(np.cumsum(sizes) - sizes, sizes)
        within = np.arange(len(first)) - first
        place = np.repeat(self.starts[order], sizes) + within
        around = np.concatenate(([start], text, [end]))  # place p of the text is p + 1 here
        return {
            "tokens": np.where(within == 0, start, around[place]),
            "targets": np.where(within == np.repeat(sizes, sizes) - 1, end, around[place + 1]),
            "positions": np.repeat(self.masks[order], sizes),
            "blocks": within + 1,
        }


class GlmSamples:
    """tokens, targets, positions, blocks int64 [b, s], weights float64 [b, s], context int64 [b].

    weights are 1 / written in part B and 0 in part A and in the padding, which is [eop] at the
    end, where a causal part B never looks back from. context is the length of part A.
    """

    def __init__(self, source: SampleSource) -> None:
        require_length(source.model.seq_length, least=3, holds="[MASK], [sop] and a token")
        self.dataset, self.seed = source.dataset, source.seed
        self.seq_length = source.model.seq_length
        self.mask, self.start, self.end = (source.special[name] for name in (MASK, START, END))
        self.text = text_length(source.model.seq_length)
        self.thresholds = length_thresholds(min(LONGEST_SPAN, source.model.seq_length // 2))
        self.packed = source.packed(self.text)
        self.samples_per_epoch = self.packed.samples_per_epoch

    def batch(self, numbers: Sequence[int]) -> Fields:
        """The samples of these numbers, as the class says; a sample depends on its number alone."""
        return stack(self._sample(number) for number in numbers)

    def _sample(self, number: int) -> dict[str, Any]:
        kept, blanks, order = self._blanks(number)
        text = self.packed.sample(number)[:kept]
        context = blanks.part_a(text, self.mask)
        written = blanks.part_b(text, order, start=self.start, end=self.end)
        a, b = len(context), len(written["tokens"])
        fields: dict[str, NDArray[Any]] = {}
        for name, part in written.items():
            filler = self.end if name in ("tokens", "targets") else 0
            fields[name] = np.full(self.seq_length, filler, np.int64)
            fields[name][a : a + b] = part
        fields["tokens"][:a] = context
        fields["positions"][:a] = np.arange(a)
        weights = np.zeros(self.seq_length)
        weights[a : a + b] = 1 / b
        return {**fields, "weights": weights, "context": np.int64(a)}

    def _blanks(self, number: int) -> tuple[int, Blanks, Tokens]:
        """The text kept, its blanks, and the order in which they are written."""
        most = -(-3 * self.text // 20)  # spans of one token
        words = draw(self.seed, number, LENGTHS, most)
        drawn = np.searchsorted(self.thresholds, words, side="right") + 1
        kept, k = fitting(drawn, text=self.text, seq_length=self.seq_length)
        lengths = drawn[:k]
        places = draw(self.seed, number, PLACES, kept - int(lengths.sum()) + k)
        masks = choose(places, k)
        in_text = np.argsort(masks)
        order = choose(draw(self.seed, number, ORDER, k), k)
        return kept, Blanks(masks[in_text], lengths[in_text]), order
