"""Random words for a sample: a stateless function of (seed, sample number, purpose).

The words are Philox4x64's (Salmon et al. 2011), key [seed, number], counter [0, 0, 0, purpose].
The purpose, from 1 on, stands in the counter's highest word, so the streams of two purposes never
overlap, nor do they meet the epochs' permutations, which count from 0 (data/samples.py). Each
family numbers the purposes of its samples itself, and never changes a number: it would change the
data of old runs. NumPy promises these raw words for good, but
none of its distributions; what is needed is derived here, in integers, the same on any machine.
By hand: the words 30, 10, 20 choose places 1, 2, 0, in that order; modulo 7 they are 2, 3, 6.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]


def draw(seed: int, number: int, purpose: int, count: int) -> Words:
    """The first `count` words of the stream, uint64 [count]; seed and number below 2^64."""
    key = np.array([seed, number], np.uint64)
    counter = np.array([0, 0, 0, purpose], np.uint64)
    return np.random.Philox(counter=counter, key=key).random_raw(count)


def integers(words: Words, bound: int) -> NDArray[np.int64]:
    """An integer of range(bound) for each word: the remainder, whose distribution is uniform but
    for less than bound / 2^64."""
    return (words % np.uint64(bound)).astype(np.int64)


def choose(words: Words, count: int) -> NDArray[np.int64]:
    """`count` different indices of range(len(words)) in random order, int64 [count]."""
    return np.argsort(words, kind="stable")[:count].astype(np.int64)


def compose(words: Words, parts: int) -> NDArray[np.int64]:
    """len(words) + 1 as a sum of `parts` positive terms, every way as likely, int64 [parts].

    By hand: three words make 4, in two parts 1 + 3, 2 + 2 or 3 + 1: one of three places is cut.
    """
    assert 0 < parts <= len(words) + 1, f"{len(words) + 1} in {parts} parts"
    cuts = np.sort(choose(words, parts - 1)) + 1
    return np.diff(np.concatenate(([0], cuts, [len(words) + 1])))
