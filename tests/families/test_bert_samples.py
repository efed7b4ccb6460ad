"""What BERT trains on: pairs and masks, by hand and read back."""

import numpy as np
import pytest
from hypothesis import given, settings

from mpctl.data.samples import PackedSamples
from mpctl.errors import InputError
from mpctl.families.bert.samples import predicted_count
from tests.families.family_samples import (
    WORDS,
    dataset,
    numbers,
    one,
    packed,
    samples,
    seeds,
    seq_lengths,
    special,
)


def test_predicted_counts_by_hand():
    assert [predicted_count(n) for n in (2, 9, 10, 20, 125, 509)] == [1, 1, 2, 3, 19, 76]


@settings(max_examples=100, deadline=None)
@given(seq_lengths, seeds, numbers)
def test_bert_reads_back_as_its_pair(text, seq_length, seed, number):
    sample, ids = one("bert", text, seq_length, seed, number), special("bert", seq_length)
    targets, types = sample["targets"], sample["types"]
    middle = types.index(1)  # where B begins
    assert types == [0] * middle + [1] * (seq_length - middle)
    places = (0, middle - 1, seq_length - 1)
    assert [targets[p] for p in places] == [ids["[CLS]"], ids["[SEP]"], ids["[SEP]"]]
    first, second = targets[1 : middle - 1], targets[middle:-1]
    assert first and second
    assert max(first + second) < WORDS
    raw = packed(text, seq_length - 3, seed, number)
    assert first == raw[: len(first)]
    if not sample["next"]:
        assert second == raw[len(first) :]
    else:  # every token of an epoch's text stands in one sample
        assert not set(second) & set(raw)
        n = PackedSamples(text, seq_length - 3, seed).samples_per_epoch
        epoch = range(number // n * n, number // n * n + n)
        assert second in [packed(text, seq_length - 3, seed, m)[len(first) :] for m in epoch]
    predicted = [p for p in range(seq_length) if sample["weights"][p]]
    assert len(predicted) == predicted_count(seq_length - 3)
    assert not set(predicted) & set(places)
    assert {sample["weights"][p] for p in predicted} == {1 / len(predicted)}
    kept = [p for p in range(seq_length) if p not in predicted]
    assert [sample["tokens"][p] for p in kept] == [targets[p] for p in kept]


def test_bert_shares(text):
    """8 : 1 : 1 of what is predicted; half of the pairs from elsewhere; no place preferred."""
    count, length = 2000, 63  # 60 text tokens, 9 of them predicted
    batch = samples("bert", text, length).batch(range(count))
    chosen = batch["weights"] > 0
    tokens, targets = batch["tokens"][chosen], batch["targets"][chosen]
    total = 9 * count
    assert len(tokens) == total
    masked = tokens == special("bert", length)["[MASK]"]
    stays = tokens == targets
    other = ~masked & ~stays
    for share, expected in ((masked, 0.8), (stays, 0.1), (other, 0.1)):
        assert abs(share.mean() - expected) < 4 * (expected * (1 - expected) / total) ** 0.5
    # Each decides alone: the number of [MASK]s in a sample is binomial, its variance 9 x 0.16.
    row, _ = np.nonzero(chosen)
    assert np.bincount(row[masked], minlength=count).var() == pytest.approx(1.44, rel=0.15)
    ids = tokens[other]
    assert ids.max() < WORDS
    digits = np.bincount(ids % 10, minlength=10)  # what was drawn does not tell what is drawn
    assert abs(digits - len(ids) / 10).max() < 4 * (len(ids) / 10) ** 0.5
    assert abs(ids.mean() / WORDS - 0.5) < 4 * (1 / 12 / len(ids)) ** 0.5
    assert abs(batch["next"].mean() - 0.5) < 4 * (0.25 / count) ** 0.5
    cuts = batch["types"].argmax(axis=1) - 2  # 1 to 59
    assert (cuts.min(), cuts.max()) == (1, 59)
    assert abs(cuts.mean() - 30) < 4 * (59**2 / 12 / count) ** 0.5
    in_text = chosen[:, 1:-1].mean(axis=0)  # a [SEP] takes each place once in 60
    assert abs(in_text - 0.15 * 60 / 61).max() < 5 * (0.1275 / count) ** 0.5


def test_bert_takes_other_texts_from_the_whole_epoch(text):
    made = samples("bert", text, 63)
    n = made.samples_per_epoch
    others = [[made._other(number, jump) for jump in range(n - 1)] for number in (0, 7, n + 2)]
    assert sorted(others[0]) == list(range(1, n))
    assert sorted(others[1]) == [i for i in range(n) if i != 7]
    assert sorted(others[2]) == [n + i for i in range(n) if i != 2]


def test_bert_needs_two_samples(tmp_path):
    data = dataset(tmp_path, [40])
    with pytest.raises(InputError, match="do not fill two samples of 20") as caught:
        samples("bert", data, 23)
    assert "22 or less" in caught.value.issues[0].hint
    assert samples("bert", data, 22).samples_per_epoch == 2
