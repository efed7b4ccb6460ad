"""What GLM trains on: blanks and positions, by hand and read back."""

from math import exp, factorial

import numpy as np
import pytest
from hypothesis import given, settings

from mpctl.families.glm.family import text_length
from mpctl.families.glm.samples import Blanks, fitting, length_thresholds
from tests.families.family_samples import numbers, one, packed, samples, seeds, seq_lengths, special


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
