"""What T5 trains on: spans and lengths, by hand and read back."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from mpctl.errors import InputError
from mpctl.families.t5.family import Lengths, lengths, target_length
from mpctl.families.t5.samples import corrupt
from tests.families.family_samples import (
    VOCAB,
    numbers,
    one,
    packed,
    samples,
    seeds,
    seq_lengths,
    special,
)


def test_t5_lengths_by_hand():
    """568 and 114 for 512: what T5's own random_spans_helper finds for its pre-training."""
    assert lengths(512) == Lengths(text=568, noise=85, spans=28)
    assert target_length(512) == 114
    assert lengths(3) == lengths(0) == Lengths(2, 1, 1)
    assert target_length(3) == target_length(1) == 3
    assert Lengths.of(30) == Lengths(30, 5, 2)  # 4.5 and 1.67
    assert [Lengths.of(text).spans for text in (29, 49, 50)] == [1, 2, 3]  # of 4, 7 and 8


@pytest.mark.parametrize("span", [range(3, 700), range(4000, 4200), range(131_000, 131_100)])
def test_t5_fills_every_length_exactly(span):
    for seq_length in span:
        found = lengths(seq_length)
        assert found.inputs == seq_length
        assert Lengths.of(found.text + 1).inputs > seq_length
        assert 0 < found.spans <= min(found.noise, found.kept)
        assert abs(found.noise - 0.15 * found.text) <= 0.851  # at least one of two
        assert found.targets == target_length(seq_length) < seq_length + 1


def test_t5_example_of_the_docstring():
    inputs, targets = corrupt(
        np.array([1, 2, 3, 4, 5, 6]),
        kept=np.array([2, 1]), noise=np.array([1, 2]), sentinels=np.array([99, 98]), end=90,
    )  # fmt: skip
    assert inputs.tolist() == [1, 2, 99, 4, 98, 90]
    assert targets.tolist() == [99, 3, 98, 5, 6, 90]


def pieces(tokens: list[int], ends: list[int]) -> list[list[int]]:
    """What lies before, between and behind the tokens `ends`, each of which stands there once."""
    places = [-1, *(tokens.index(end) for end in ends), len(tokens)]
    assert places == sorted(places)
    return [tokens[a + 1 : b] for a, b in pairwise(places)]


@settings(max_examples=100, deadline=None)
@given(seq_lengths, seeds, numbers)
def test_t5_reads_back_as_its_text(text, seq_length, seed, number):
    sample, ids = one("t5", text, seq_length, seed, number), special("t5", seq_length)
    expected, written = lengths(seq_length), target_length(seq_length)
    sentinels = [ids[f"<extra_id_{i}>"] for i in range(expected.spans)]
    assert sentinels == [VOCAB - 1 - i for i in range(expected.spans)]
    *kept, nothing = pieces(sample["tokens"], [*sentinels, ids["</s>"]])[:-1]
    assert nothing == []  # noise ends the text
    before, *noise = pieces(sample["targets"][:written], [*sentinels, ids["</s>"]])[:-1]
    assert before == []
    assert sample["targets"][written - 1] == sample["tokens"][-1] == ids["</s>"]
    assert all(kept) and all(noise)
    assert sum(map(len, noise)) == expected.noise
    read = [token for pair in zip(kept, noise, strict=True) for span in pair for token in span]
    assert read == packed(text, expected.text, seed, number)
    assert sample["targets"][written:] == [ids["<pad>"]] * 2
    assert sample["decoder_tokens"] == [ids["<pad>"], *sample["targets"][:-1]]
    assert sample["weights"] == [1 / written] * written + [0] * 2


def test_t5_lengths_of_text_and_noise_are_independent(text):
    """Two spans each: all first lengths occur, as often as others, whatever the other one is."""
    made, count = samples("t5", text, 28), 2000
    assert made.lengths == Lengths(30, 5, 2)
    batch, ids = made.batch(range(count)), special("t5", 28)
    kept = (batch["tokens"] == ids["<extra_id_0>"]).argmax(axis=1)
    noise = (batch["targets"] == ids["<extra_id_1>"]).argmax(axis=1) - 1
    for first, ways in ((kept, 24), (noise, 4)):
        counts = np.bincount(first)[1:]
        assert len(counts) == ways
        assert abs(counts - count / ways).max() < 4 * (count / ways) ** 0.5
    assert abs((kept == noise).mean() - 1 / 24) < 4 * (1 / 24 / count) ** 0.5


def test_t5_decoder_must_hold_the_targets(text):
    assert samples("t5", text, 512, decoder_seq_length=114).batch([0])["weights"].all()
    for short in (113, None):
        with pytest.raises(InputError, match=f"{short or 0} tokens do not hold the 114") as caught:
            samples("t5", text, 512, decoder_seq_length=short)
        assert caught.value.issues[0].hint == "use 114 or more"
