"""What every family trains on: shapes, determinism, and GPT's next tokens."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings

from mpctl.data.samples import PackedSamples, SampleSource
from mpctl.errors import InputError
from mpctl.families import get_family
from mpctl.families.implementation import get_implementation
from mpctl.families.t5.family import target_length
from tests.families.family_samples import (
    VOCAB,
    WORDS,
    dataset,
    model,
    numbers,
    one,
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
        "bert": (14, [3099, 2118, 2119, 1203, 1204, 1205, 1206, 1207, 3098,
                      150, 151, 152, 3097, 3098]),
        "t5": (29, [2109, 3099, 2113, 2114, 2115, 2116, 2117, 2118, 2119, *range(1203, 1221),
                    3098, 3096]),
        "glm": (24, [70, 1620, 229, 230, 3099, *range(237, 247), 3098, *range(231, 237),
                     3097, 3097]),
    }  # fmt: skip
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
