"""Samples of every family's objective, by their laws and by hand."""

import hashlib
from itertools import pairwise
from math import exp, factorial

import numpy as np
import pytest
from hypothesis import given, settings

from mpctl.core.errors import InputError
from mpctl.model.families import get_family
from mpctl.model.families.t5.family import Lengths, lengths, target_length
from mpctl.train.data.samples import PackedSamples, SampleSource
from mpctl.train.families.bert.samples import predicted_count
from mpctl.train.families.glm.samples import Blanks, fitting, length_thresholds, text_length
from mpctl.train.families.implementation import get_implementation
from mpctl.train.families.t5.samples import corrupt
from tests.model.families.family_samples import (
    VOCAB,
    WORDS,
    dataset,
    model,
    numbers,
    one,
    packed,
    samples,
    seeds,
    seq_lengths,
    special,
)

FAMILIES = ("gpt", "bert", "t5", "glm")


every_family = pytest.mark.parametrize("family", FAMILIES)


def digest(batch) -> str:
    """Of names, types and values; little-endian on any machine."""
    hashed = hashlib.sha256()
    for name, field in sorted(batch.items()):
        values = field.astype(field.dtype.newbyteorder("<"))
        hashed.update(f"{name} {field.shape} {field.dtype.name}".encode() + values.tobytes())
    return hashed.hexdigest()[:16]


@every_family
def test_a_batch_has_the_arrays_that_the_family_describes(family, text):
    """By name, with the sizes that the names of their dimensions stand for, 8 bytes an element;
    memory is estimated by the description."""
    shape, described = model(family, 24), get_family(family).batch_arrays
    sizes = {"batch": 3, "seq": 24, "decoder_seq": shape.decoder_seq_length}
    batch = samples(family, text, 24).batch([0, 1, 2])
    assert batch.keys() == described.keys()
    for name, array in described.items():
        assert batch[name].shape == tuple(sizes[dim] for dim in array.dims)
        assert batch[name].dtype.itemsize == 8
        assert not array.is_tokens or batch[name].max() < VOCAB


@every_family
def test_a_batch_is_its_samples(family, text):
    """Alone, in any company and order, made by another object: a number is one sample."""
    made = samples(family, text, 24)
    n = made.samples_per_epoch
    wanted = [3, n + 5, n - 1, 2 * n, 3]
    together = made.batch(wanted)
    for place, number in enumerate(wanted):
        alone = samples(family, text, 24).batch([number])
        assert list(alone) == list(together)
        for name, field in together.items():
            assert (field[place] == alone[name][0]).all()
            assert field[place].dtype == alone[name].dtype


@every_family
def test_seed_and_number_decide(family, text):
    def tokens(seed, number):
        return samples(family, text, 24, seed).batch([number])["tokens"].tolist()

    assert tokens(1, 3) == tokens(1, 3)
    assert tokens(1, 3) != tokens(2, 3)
    assert tokens(1, 3) != tokens(1, 4)


@every_family
def test_without_shuffling_text_is_in_order_and_noise_is_not(family, text):
    """A held-out sample is the same every time; an epoch on, the same text has other noise."""
    source = SampleSource(text, model(family, 40), 1, special(family, 40), WORDS, shuffle=False)
    made = get_implementation(family).samples(source)
    batch = made.batch([0, made.samples_per_epoch])
    tokens = batch["targets" if family == "bert" else "tokens"]
    assert (tokens[0] == tokens[1]).all() == (family == "gpt")
    for row in tokens:  # bert's B may be from elsewhere, its A is not
        read = row[1:2] if family == "bert" else row[row < WORDS]
        assert read.size and read.max() < 50


@every_family
@settings(max_examples=60, deadline=None)
@given(seq_length=seq_lengths, seed=seeds, number=numbers)
def test_shapes_types_and_ranges(family, text, seq_length, seed, number):
    made = samples(family, text, seq_length, seed)
    batch = made.batch([number, number + 1])
    decoder = target_length(seq_length) + 2
    for name, field in batch.items():
        is_written = family == "t5" and name != "tokens"
        row = () if name in ("next", "context") else (decoder if is_written else seq_length,)
        assert field.shape == (2, *row), name
        assert field.dtype == (np.float64 if name == "weights" else np.int64), name
        assert (field >= 0).all()
    for name in {"tokens", "decoder_tokens", "targets"} & set(batch):
        assert (batch[name] < VOCAB).all()
    if family != "gpt":
        assert batch["weights"].sum(axis=1) == pytest.approx([1, 1], abs=1e-12)
    assert made.dataset is text


@pytest.mark.parametrize(("family", "least"), [("bert", 5), ("t5", 3), ("glm", 3)])
def test_the_shortest_sample(family, least, text):
    assert samples(family, text, least).batch([0, 1])["tokens"].shape == (2, least)
    with pytest.raises(InputError, match=f"use {least} or more") as caught:
        samples(family, text, least - 1)
    assert caught.value.issues[0].rule == "seq-length-too-short"


@every_family
def test_too_little_text(family, tmp_path):
    with pytest.raises(InputError) as caught:
        samples(family, dataset(tmp_path, [20]), 40)
    assert caught.value.issues[0].rule == "samples-too-few-tokens"


def test_samples_are_pinned(text):
    """A change here changes the data of every run."""
    tokens = {
        "gpt": (6, [1596, 1597, 1598, 1599, 1621, 1622]),
        "bert": (14, [3099, 2118, 2119, 1203, 1204, 1205, 1206, 1207, 3098, 150, 151, 152, 3097, 3098]),
        "t5": (29, [2109, 3099, 2113, 2114, 2115, 2116, 2117, 2118, 2119, *range(1203, 1221), 3098, 3096]),
        "glm": (24, [70, 1620, 229, 230, 3099, *range(237, 247), 3098, *range(231, 237), 3097, 3097]),
    }
    for family, (seq_length, expected) in tokens.items():
        assert one(family, text, seq_length, 1234, 3)["tokens"] == expected
    assert {f: digest(samples(f, text, 64, 1234).batch(range(40))) for f in FAMILIES} == {
        "gpt": "bb81f5415fcb2b6a",
        "bert": "01c633b375fbdc1a",
        "t5": "66f5352a65fa2f1a",
        "glm": "5acd2f1777fde564",
    }


def test_gpt_predicts_the_next_token(text):
    whole = PackedSamples(text, 16, 1).sample(5).tolist()
    sample = one("gpt", text, 16, 1, 5)
    assert sample == {"tokens": whole[:-1], "targets": whole[1:]}


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


def test_glm_example_of_the_docstring():
    """Figure 2 of arXiv 2103.10360."""
    sentence = np.array([1, 2, 3, 4, 5, 6])
    blanks = Blanks(masks=np.array([2, 4]), lengths=np.array([1, 2]))
    assert blanks.starts.tolist() == [2, 4]
    assert blanks.part_a(sentence, 99).tolist() == [1, 2, 99, 4, 99]
    fields = blanks.part_b(sentence, np.array([1, 0]), start=98, end=97)
    assert {name: field.tolist() for name, field in fields.items()} == {
        "tokens": [98, 5, 6, 98, 3],
        "targets": [5, 6, 97, 3, 97],
        "positions": [4, 4, 4, 2, 2],
        "blocks": [1, 2, 3, 1, 2],
    }


def test_glm_text_lengths_by_hand():
    assert [text_length(s) for s in (3, 8, 16, 512)] == [1, 6, 14, 464]
    assert text_length(512) + 2 * 24 == 512  # 464 / 20 is 23.2
    ones = np.ones(20, np.int64)
    assert fitting(np.array([1, 2, 3]), text=7, seq_length=8) == (6, 1)
    assert fitting(np.array([2, 2, 3]), text=7, seq_length=9) == (7, 1)
    assert fitting(ones, text=100, seq_length=130) == (100, 15)
    assert fitting(ones, text=100, seq_length=129) == (99, 15)
    assert fitting(ones, text=100, seq_length=128) == (98, 15)


def test_glm_lengths_are_poisson():
    """Without 0; what is left out beyond 20 is less than the tolerance."""
    bounds = [0, *length_thresholds(20).tolist(), 2**64]
    shares = np.diff([bound / 2**64 for bound in bounds])
    poisson = [exp(-3) * 3**k / factorial(k) / (1 - exp(-3)) for k in range(1, 21)]
    assert shares == pytest.approx(poisson, abs=1e-10)
    assert length_thresholds(2).tolist() == [2 * 2**64 // 5]
    assert length_thresholds(1).size == 0


@pytest.mark.parametrize("longest", [False, True])
def test_glm_fits_whatever_is_drawn(longest):
    """All spans of one token take the most room, all of the longest cover the most text."""
    for seq_length in range(3, 700):
        n = text_length(seq_length)
        length = min(20, seq_length // 2) if longest else 1
        drawn = np.full(-(-3 * n // 20), length)
        kept, spans = fitting(drawn, text=n, seq_length=seq_length)
        assert 0 < kept <= n and kept + 2 * spans <= seq_length
        assert 20 * drawn[:spans].sum() >= 3 * kept
        assert drawn[:spans].sum() <= kept
        assert seq_length < 5 or drawn[:spans].sum() < kept


@settings(max_examples=100, deadline=None)
@given(seq_lengths, seeds, numbers)
def test_glm_reads_back_as_its_text(text, seq_length, seed, number):
    sample, ids = one("glm", text, seq_length, seed, number), special("glm", seq_length)
    a, b = sample["context"], sum(weight > 0 for weight in sample["weights"])
    assert sample["positions"][:a] == list(range(a))
    assert sample["blocks"][:a] == [0] * a
    masks = [p for p in range(a) if sample["tokens"][p] == ids["[MASK]"]]
    filled: dict[int, list[int]] = {}
    for p in range(a, a + b):  # as it is written, a token after the other
        mask, block = sample["positions"][p], sample["blocks"][p]
        if sample["tokens"][p] == ids["[sop]"]:
            assert (mask not in filled, block) == (True, 1)
            filled[mask] = []
        else:
            assert (sample["tokens"][p], block) == (filled[mask][-1], len(filled[mask]) + 1)
        filled[mask].append(sample["targets"][p])
    assert sorted(filled) == masks
    assert all(span.pop() == ids["[eop]"] and span for span in filled.values())
    read = [token for p, own in enumerate(sample["tokens"][:a]) for token in filled.get(p, [own])]
    assert read == packed(text, text_length(seq_length), seed, number)[: len(read)]
    covered = sum(map(len, filled.values()))
    assert 20 * covered >= 3 * len(read)
    assert 20 * (covered - max(map(len, filled.values()))) < 3 * len(read)
    assert a + b == len(read) + 2 * len(filled) <= seq_length
    assert sample["weights"] == [0] * a + [1 / b] * b + [0] * (seq_length - a - b)
    assert set(sample["tokens"][a + b :]) <= {ids["[eop]"]}


def test_glm_wastes_little(text):
    batch = samples("glm", text, 512).batch(range(300))
    written = (batch["weights"] > 0).sum(axis=1)
    padding = 512 - batch["context"] - written
    assert padding.mean() / 512 < 0.012
    spans = (batch["blocks"] == 1).sum(axis=1)
    kept = batch["context"] + written - 2 * spans
    assert 1 - kept.mean() / text_length(512) < 0.005
    assert (written - spans).mean() / kept.mean() == pytest.approx(0.155, abs=0.005)


def test_glm_places_and_orders_are_random(text):
    """Long or short, a span stands anywhere and is written at any turn: the one drawn last, which
    is longer than others as it ends the drawing, is neither the text's last nor B's."""
    made, rows = samples("glm", text, 64), []
    for number in range(1500):
        kept, blanks, order = made._blanks(number)
        if len(order) > 1:
            centres = (blanks.starts + blanks.lengths / 2) / kept
            turns = np.argsort(order) / (len(order) - 1)
            rows += zip(centres, blanks.lengths, turns, strict=True)
    spans = np.array(rows)
    assert len(spans) > 3000
    assert spans[:, 0].mean() == pytest.approx(0.5, abs=0.02)
    assert spans[:, 0].var() == pytest.approx(1 / 12, abs=0.01)
    assert set(spans[:, 2]) >= {0, 1}
    correlations = np.corrcoef(spans.T)[np.triu_indices(3, 1)]
    assert abs(correlations).max() < 4 / len(spans) ** 0.5


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
        kept=np.array([2, 1]),
        noise=np.array([1, 2]),
        sentinels=np.array([99, 98]),
        end=90,
    )
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
