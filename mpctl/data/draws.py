"""Random words for a sample: a stateless function of (seed, sample number, purpose).

The words are Philox4x64's (Salmon et al. 2011), key [seed, number], counter [0, 0, 0, purpose]:
the purpose stands in the counter's highest word, so no two purposes ever meet, nor the epochs'
permutations, which count from 0 (data/samples.py). NumPy promises these raw words for good, but
none of its distributions; what is needed is derived here, in integers, the same on any machine.
By hand: the words 30, 10, 20 choose places 1, 2, 0, in that order; modulo 7 they are 2, 3, 6.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]


class Purpose(IntEnum):
    """What words are for. A number is never used again: it would change the data of old runs."""

    BERT_PAIR = 1
    BERT_PLACES = 2
    BERT_MASKS = 3
    T5_KEPT = 4
    T5_NOISE = 5
    GLM_LENGTHS = 6
    GLM_PLACES = 7
    GLM_ORDER = 8


def draw(seed: int, number: int, purpose: Purpose, count: int) -> Words:
    """The first `count` words of this stream, uint64 [count]; seed and number below 2^64."""
    key = np.array([seed, number], np.uint64)
    counter = np.array([0, 0, 0, purpose], np.uint64)
    return np.random.Philox(counter=counter, key=key).random_raw(count)


def integers(words: Words, bound: int) -> NDArray[np.int64]:
    """One of range(bound) for each word: the remainder, unfair by less than bound / 2^64."""
    return (words % np.uint64(bound)).astype(np.int64)


def choose(words: Words, count: int) -> NDArray[np.int64]:
    """`count` of the places range(len(words)), none twice, in random order, int64 [count]."""
    return np.argsort(words, kind="stable")[:count].astype(np.int64)


def compose(words: Words, parts: int) -> NDArray[np.int64]:
    """len(words) + 1 as a sum of `parts` positive terms, every way as likely, int64 [parts].

    By hand: three words make 4, in two parts 1 + 3, 2 + 2 or 3 + 1: one of three places is cut.
    """
    assert 0 < parts <= len(words) + 1, f"{len(words) + 1} in {parts} parts"
    cuts = np.sort(choose(words, parts - 1)) + 1
    return np.diff(np.concatenate(([0], cuts, [len(words) + 1])))
