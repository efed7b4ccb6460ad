"""Merges by counts kept up to date are those of counting everything again each time."""

from __future__ import annotations

import random
import time
from collections import Counter
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpctl.data.merges import LEAST_COUNT, Pair, joined, learn_merges

Words = dict[tuple[int, ...], int]


def join_new(first: int):
    """Every pair makes a new id, `first` and up."""
    made = iter(range(first, 10**9))
    return lambda left, right: next(made)


def learned(words: Words, first: int, most: int) -> list[tuple[Pair, int]]:
    return list(islice(learn_merges(words, join_new(first)), most))


def counted_again(words: Words, first: int, most: int) -> list[tuple[Pair, int]]:
    """The definition: count all pairs, join the most frequent everywhere, repeat."""
    held = [(list(word), count) for word, count in words.items()]
    merges: list[tuple[Pair, int]] = []
    for made in range(first, first + most):
        counts: Counter[Pair] = Counter()
        for word, count in held:
            for pair in pairwise(word):
                counts[pair] += count
        best = min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if best is None or counts[best] < LEAST_COUNT:
            break
        merges.append((best, made))
        held = [(joined(word, best, made), count) for word, count in held]
    return merges


def test_by_hand() -> None:
    """abc seven times, xbc twice; then `bonjour`, as extend.py tells it."""
    assert learned({(0, 1, 2): 7, (9, 1, 2): 2}, 10, 9) == [
        ((1, 2), 10), ((0, 10), 11), ((9, 10), 12),
    ]  # fmt: skip
    assert learned({(0, 6, 1, 3, 5, 4): 5}, 7, 4) == [
        ((0, 6), 7), ((1, 3), 8), ((5, 4), 9), ((7, 8), 10),
    ]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.lists(st.integers(0, 3), min_size=1, max_size=9).map(tuple), st.integers(1, 9),
        max_size=12,
    )
)  # fmt: skip
def test_the_same_as_counting_again(words: Words) -> None:
    assert learned(words, 4, 30) == counted_again(words, 4, 30)


def test_a_pair_that_stays_apart_does_not_end_the_learning() -> None:
    words = {(0, 1): 9, (2, 3): 5, (0, 1, 4): 3}
    made = join_new(10)
    found = learn_merges(words, lambda a, b: None if (a, b) == (0, 1) else made(a, b))
    assert list(found) == [((2, 3), 10), ((1, 4), 11), ((0, 11), 12)]


def test_words_of_one_letter_and_rare_pairs() -> None:
    assert learned({(7,) * 7: 1}, 10, 9) == counted_again({(7,) * 7: 1}, 10, 9)
    assert learned({(0, 1): 1, (2, 3): 1, (5,): 100}, 10, 9) == []


@pytest.mark.slow
def test_thousands_of_merges_take_seconds() -> None:
    """Recounting these 20,000 words 2,000 times would take minutes."""
    draw = random.Random(7)
    words = {tuple(draw.choices(range(60), k=draw.randint(2, 9))): draw.randint(1, 50)
             for _ in range(20_000)}  # fmt: skip
    began = time.process_time()
    assert len(learned(words, 97, 2000)) == 2000
    assert time.process_time() - began < 20
