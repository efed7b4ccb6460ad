"""Packing, shuffling and sharding: what every sample holds follows from its number alone."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpctl.data.indexed import IndexedDataset, IndexedWriter
from mpctl.data.samples import PackedSamples, sample_numbers
from mpctl.errors import InputError


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
def test_an_epoch_covers_every_position_at_most_once(
    tmp_path_factory, lengths, seq_length, seed, epoch
):
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
            step=step,
            micro_batch=micro_batch,
            micro_batch_size=b,
            dp_rank=rank,
            dp_size=dp,
            global_batch_size=g,
        )
    ]


def test_example_of_the_docstring():
    sizes = {"micro_batch_size": 2, "dp_size": 2, "global_batch_size": 8}
    taken = [[*sample_numbers(step=0, micro_batch=j, dp_rank=1, **sizes)] for j in (0, 1)]
    assert taken == [[2, 3], [6, 7]]


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


@pytest.mark.parametrize(
    "change", [{"dp_rank": 2}, {"dp_rank": -1}, {"micro_batch": 2}, {"global_batch_size": 9}]
)
def test_numbers_out_of_range(change):
    good = {"micro_batch_size": 2, "dp_rank": 1, "dp_size": 2, "global_batch_size": 8}
    with pytest.raises(ValueError, match=r"of 2|batches of 4"):
        sample_numbers(**({"step": 0, "micro_batch": 1} | good | change))
