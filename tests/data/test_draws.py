"""Words by purpose, and what is made of them: held against Philox spelled out by hand."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpctl.data.draws import choose, compose, draw, integers

WORD = 2**64 - 1
words64 = st.integers(0, WORD)


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x64 of ten rounds, Salmon et al. 2011, section 3.3; constants of its table 2."""
    for _ in range(10):
        low, high = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
        counter = [
            high >> 64 ^ counter[1] ^ key[0],
            high & WORD,
            low >> 64 ^ counter[3] ^ key[1],
            low & WORD,
        ]
        key = [key[0] + 0x9E3779B97F4A7C15 & WORD, key[1] + 0xBB67AE8584CAA73B & WORD]
    return counter


def test_the_oracle_gives_the_authors_answers():
    """kat_vectors of Random123, philox4x64 10."""
    assert philox([0] * 4, [0] * 2) == [
        0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B,
    ]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(words64, words64, st.integers(1, 8), st.integers(0, 9))
def test_words_are_philox_of_seed_number_and_purpose(seed, number, purpose, count):
    blocks = [philox([block, 0, 0, purpose], [seed, number]) for block in (1, 2, 3)]
    expected = [word for block in blocks for word in block][:count]
    assert draw(seed, number, purpose, count).tolist() == expected


def test_no_purpose_shares_words_with_another_or_with_an_epoch():
    streams = [draw(7, 3, purpose, 200) for purpose in range(1, 9)]
    epoch = np.random.Philox(key=np.array([7, 3], np.uint64)).random_raw(200)
    assert len(np.unique(np.concatenate([*streams, epoch]))) == 200 * 9


def test_examples_of_the_docstrings():
    words = np.array([30, 10, 20], np.uint64)
    assert choose(words, 3).tolist() == [1, 2, 0]
    assert choose(words, 1).tolist() == [1]
    assert integers(words, 7).tolist() == [2, 3, 6]
    assert integers(np.array([WORD], np.uint64), 10).tolist() == [5]  # 2^64 = ..616
    ways = {tuple(compose(np.array(order, np.uint64), 2)) for order in permutations((1, 2, 3))}
    assert ways == {(1, 3), (2, 2), (3, 1)}
    assert compose(words, 1).tolist() == [4]
    assert compose(words, 4).tolist() == [1, 1, 1, 1]
    with pytest.raises(AssertionError):
        compose(words, 5)


def test_every_choice_and_every_composition_is_as_likely():
    n = 6000
    chosen = Counter(tuple(choose(draw(1, i, 2, 4), 2)) for i in range(n))
    summed = Counter(tuple(compose(draw(1, i, 4, 5), 3)) for i in range(n))
    for counts, ways in ((chosen, 12), (summed, 10)):  # 4 x 3; 5 choose 2
        assert len(counts) == ways
        spread = (n / ways) ** 0.5
        assert all(abs(count - n / ways) < 5 * spread for count in counts.values())
