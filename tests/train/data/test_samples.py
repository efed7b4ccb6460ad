"""Samples and what is drawn for them follow from seed and number alone."""

from __future__ import annotations

from collections import Counter
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpctl.core.errors import InputError
from mpctl.train.data.indexed import IndexedDataset, IndexedWriter
from mpctl.train.data.samples import PackedSamples, choose, compose, draw, integers, sample_numbers


def dataset(folder, lengths) -> IndexedDataset:
    """Documents of these lengths; every token of the dataset is another number."""
    tokens = np.arange(sum(lengths))
    with IndexedWriter(folder / "x", np.dtype("<i4")) as writer:
        for piece in np.split(tokens, np.cumsum(lengths)[:-1]):
            writer.add_document(piece)
    return IndexedDataset(folder / "x")


@pytest.fixture
def forty(tmp_path):
    return dataset(tmp_path, [3, 17, 1, 8, 40, 2, 29] * 6)  # 600 tokens, 42 documents


def epoch_of(samples: PackedSamples, epoch: int) -> np.ndarray:
    n = samples.samples_per_epoch
    return samples.batch(range(epoch * n, (epoch + 1) * n))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=12),
    st.integers(1, 12),
    st.integers(0, 2**64 - 1),
    st.integers(0, 3),
)
def test_an_epoch_covers_every_position_at_most_once(tmp_path_factory, lengths, seq_length, seed, epoch):
    data = dataset(tmp_path_factory.mktemp("samples"), lengths)
    if data.tokens <= seq_length:
        return
    samples = PackedSamples(data, seq_length, seed)
    cuts = epoch_of(samples, epoch)
    assert cuts.shape == ((data.tokens - 1) // seq_length, seq_length + 1)
    for part in (cuts[:, :-1], cuts[:, 1:]):  # inputs, targets
        assert len(np.unique(part)) == part.size
    assert data.tokens - len(np.unique(cuts)) < seq_length
    jumps = np.diff(cuts) != 1  # the text breaks between documents only
    bounds = np.cumsum(lengths)
    assert set(cuts[:, :-1][jumps]) <= set(bounds - 1)
    assert set(cuts[:, 1:][jumps]) <= {0, *bounds}


def test_without_shuffling_it_is_the_file(forty):
    samples = PackedSamples(forty, 16, seed=3, shuffle=False)
    for number in (0, 1, 36, 37):
        start = number % samples.samples_per_epoch * 16
        assert samples.sample(number).tolist() == list(range(start, start + 17))
    assert samples.samples_per_epoch == 37
    assert samples.sample(0).dtype == np.int64


def test_seed_and_epoch_decide(forty):
    one, again, other = (PackedSamples(forty, 16, seed) for seed in (1, 1, 2))
    assert (epoch_of(one, 0) == epoch_of(again, 0)).all()
    assert (epoch_of(one, 0) != epoch_of(other, 0)).any()
    assert (epoch_of(one, 0) != epoch_of(one, 1)).any()
    assert sorted(one._epoch(0).documents) == list(range(42))
    assert sorted(one._epoch(0).samples) == list(range(37))
    assert (one._epoch(0).documents != one._epoch(1).documents).any()
    assert (one._epoch(0).samples != np.arange(37)).any()


def test_the_order_is_pinned(forty):
    """Philox's stream is fixed by NumPy's policy: a change here changes every run's data."""
    samples = PackedSamples(forty, 16, seed=1234)
    assert samples._epoch(0).documents[:6].tolist() == [25, 14, 8, 36, 13, 9]
    assert samples._epoch(1).samples[:6].tolist() == [19, 4, 17, 16, 0, 23]


def test_any_access_order_and_few_tables(forty):
    samples, fresh = PackedSamples(forty, 16, 5), PackedSamples(forty, 16, 5)
    wanted = {n: samples.sample(n) for n in (0, 36, 37, 400, 75, 1)}
    assert len(samples._epochs) <= 2
    assert all((fresh.sample(n) == sample).all() for n, sample in reversed(wanted.items()))
    with pytest.raises(IndexError):
        samples.sample(-1)


def test_too_few_tokens(tmp_path):
    data = dataset(tmp_path, [10, 6])
    assert PackedSamples(data, 15, 0).samples_per_epoch == 1
    with pytest.raises(InputError, match=r"16 tokens do not fill one sample of 16 \+ 1") as caught:
        PackedSamples(data, 16, 0)
    assert "below 16" in caught.value.issues[0].hint


def gathered(layout: tuple[int, int], step: int, g: int) -> list[int]:
    dp, b = layout
    return [
        number
        for micro_batch, rank in product(range(g // (dp * b)), range(dp))
        for number in sample_numbers(
            step=step, micro_batch=micro_batch, micro_batch_size=b, dp_rank=rank, dp_size=dp, global_batch_size=g
        )
    ]


@pytest.mark.parametrize("layout", [(1, 1), (1, 24), (2, 3), (3, 2), (4, 6), (24, 1), (8, 1)])
def test_every_layout_takes_the_same_global_batches(forty, layout):
    samples = PackedSamples(forty, 16, 7)
    for step in (0, 1, 5):  # step 1 straddles the border of two epochs of 37
        numbers = gathered(layout, step, 24)
        assert numbers == list(range(step * 24, step * 24 + 24))
        assert (samples.batch(numbers) == samples.batch(gathered((1, 24), step, 24))).all()


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 10**6))
def test_shards_partition_the_global_batch(dp, b, micro_batches, step):
    g = dp * b * micro_batches
    assert sorted(gathered((dp, b), step, g)) == list(range(step * g, step * g + g))


@pytest.mark.parametrize("change", [{"dp_rank": 2}, {"dp_rank": -1}, {"micro_batch": 2}, {"global_batch_size": 9}])
def test_numbers_out_of_range(change):
    good = {"micro_batch_size": 2, "dp_rank": 1, "dp_size": 2, "global_batch_size": 8}
    with pytest.raises(ValueError, match=r"of 2|batches of 4"):
        sample_numbers(**({"step": 0, "micro_batch": 1} | good | change))


WORD = 2**64 - 1
words64 = st.integers(0, WORD)


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x64 of ten rounds, Salmon et al. 2011, section 3.3; constants of its table 2."""
    for _ in range(10):
        low, high = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
        counter = [high >> 64 ^ counter[1] ^ key[0], high & WORD, low >> 64 ^ counter[3] ^ key[1], low & WORD]
        key = [key[0] + 0x9E3779B97F4A7C15 & WORD, key[1] + 0xBB67AE8584CAA73B & WORD]
    return counter


def test_the_oracle_gives_the_authors_answers():
    """kat_vectors of Random123, philox4x64 10."""
    assert philox([0] * 4, [0] * 2) == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]


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


def test_bounds_of_choices_and_compositions():
    words = np.array([30, 10, 20], np.uint64)
    assert choose(words, 1).tolist() == [1]
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
