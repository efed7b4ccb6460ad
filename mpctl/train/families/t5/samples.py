"""T5's objective: spans of text give way to sentinels and are written out by the decoder.

Raffel et al., arXiv 1910.10683, section 3.1.4, with the counts of t5/family.py: lengths of text
and noise spans are random compositions of fixed totals, and they alternate, text first. As in T5's
own code noise ends the text (below seq_length 28 there is one span, hence no choice), and the
targets end with </s>; the last sentinel that the paper's figure 2 draws before it is not written.
By hand: a b c d e f with the spans c and e f: the encoder reads a b <0> d <1> </s>, the decoder
<pad> <0> c <1> e f and writes <0> c <1> e f </s>. Inputs fill seq_length exactly; targets are
padded with <pad> of weight 0, which comes last, where a causal decoder never looks back from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpctl.core.errors import InputError
from mpctl.model.families.t5.family import END, PAD, lengths, sentinel
from mpctl.train.data.samples import Fields, SampleSource, compose, draw, require_length, stack

Tokens = NDArray[np.int64]
KEPT, NOISE = 4, 5  # purposes of random words (train/data/samples.py)


def corrupt(text: Tokens, *, kept: Tokens, noise: Tokens, sentinels: Tokens, end: int) -> tuple[Tokens, Tokens]:
    """Return the encoder's input and the decoder's targets for alternating spans of these lengths.

    text [n]; kept, noise, sentinels [k], the lengths adding up to n.
    """
    is_noise = np.repeat(np.tile([False, True], len(kept)), np.stack((kept, noise), 1).ravel())
    inputs = np.insert(text[~is_noise], np.cumsum(kept), sentinels)
    targets = np.insert(text[is_noise], np.cumsum(noise) - noise, sentinels)
    return np.append(inputs, end), np.append(targets, end)


class T5Samples:
    """tokens int64 [b, s]; decoder_tokens, targets int64 and weights float64 [b, s_d].

    weights are 1 / written where a token is to be written and 0 in the padding. InputError when
    decoder_seq_length is shorter than the targets.
    """

    def __init__(self, source: SampleSource) -> None:
        require_length(source.model.seq_length, least=3, holds="a token, a sentinel and </s>")
        self.dataset, self.seed = source.dataset, source.seed
        self.lengths = lengths(source.model.seq_length)
        self.written = self.lengths.targets
        self.decoder_length = source.model.decoder_seq_length or 0
        if self.decoder_length < self.written:
            raise InputError.of(
                "decoder-holds-targets",
                "source.model.decoder_seq_length",
                f"{self.decoder_length} tokens do not hold the {self.written} that an input of "
                f"{source.model.seq_length} leaves to write",
                f"use {self.written} or more",
            )
        self.pad, self.end = source.special[PAD], source.special[END]
        sentinels = [source.special[sentinel(span)] for span in range(self.lengths.spans)]
        self.sentinels = np.array(sentinels, np.int64)
        self.packed = source.packed(self.lengths.text)
        self.samples_per_epoch = self.packed.samples_per_epoch

    def batch(self, numbers: Sequence[int]) -> Fields:
        """The samples of these numbers, as the class says; a sample depends on its number alone."""
        return stack(self._sample(number) for number in numbers)

    def _sample(self, number: int) -> dict[str, Any]:
        tokens, written = corrupt(
            self.packed.sample(number)[:-1],
            kept=self._spans(number, KEPT, self.lengths.kept),
            noise=self._spans(number, NOISE, self.lengths.noise),
            sentinels=self.sentinels,
            end=self.end,
        )
        targets = np.full(self.decoder_length, self.pad, np.int64)
        targets[: self.written] = written
        return {
            "tokens": tokens,
            "decoder_tokens": np.concatenate(([self.pad], targets[:-1])),
            "targets": targets,
            "weights": (np.arange(self.decoder_length) < self.written) / self.written,
        }

    def _spans(self, number: int, purpose: int, total: int) -> Tokens:
        return compose(draw(self.seed, number, purpose, total - 1), self.lengths.spans)
