import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.data.split import splitmix64, validates


def test_published_stream():
    """SplitMix64 from seed 1234567: the vector in Java's and Rosetta Code's test of it."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert splitmix64(1234567, 3).tolist() == expected


@given(st.integers(2, 300), st.floats(1e-9, 1, exclude_max=True), st.integers(0, 2**64 - 1))
def test_neither_side_is_empty(documents, fraction, seed):
    chosen = validates(documents, fraction, seed)
    assert 0 < chosen.sum() < documents == len(chosen)


@pytest.mark.parametrize("fraction", [0.02, 0.5])
def test_fraction_and_seed(fraction):
    one, two = (validates(20_000, fraction, seed) for seed in (1, 2))
    assert abs(one.mean() - fraction) < 0.01
    assert (one & two).mean() < fraction**2 + 0.01
    assert (one == validates(20_000, fraction, 1)).all()
