"""Text of numbers and the samples that families make of it, for the tests of samples."""

import numpy as np
from hypothesis import strategies as st

from mpctl.model.families import special_tokens
from mpctl.model.families.t5.family import target_length
from mpctl.spec.model import ModelSpec
from mpctl.train.data.indexed import IndexedDataset, IndexedWriter
from mpctl.train.data.samples import PackedSamples, SampleSource
from mpctl.train.data.tokenizer import special_ids
from mpctl.train.families.implementation import get_implementation

WORDS, VOCAB = 3000, 3100


seq_lengths = st.integers(8, 600)


seeds = st.integers(0, 2**64 - 1)


numbers = st.integers(0, 500)


def dataset(folder, lengths) -> IndexedDataset:
    """Documents of these lengths; every token of the dataset is another number."""
    tokens = np.arange(sum(lengths))
    with IndexedWriter(folder / "x", np.dtype("<i4")) as writer:
        for piece in np.split(tokens, np.cumsum(lengths)[:-1]):
            writer.add_document(piece)
    return IndexedDataset(folder / "x")


def model(family: str, seq_length: int, **changes) -> ModelSpec:
    shape = {"layers": 1, "hidden": 8, "heads": 1, "vocab": VOCAB, "seq_length": seq_length}
    if family == "t5":
        shape |= {"decoder_layers": 1, "decoder_seq_length": target_length(seq_length) + 2}
    return ModelSpec.model_validate({"family": family} | shape | changes)


def special(family: str, seq_length: int) -> dict[str, int]:
    names = special_tokens(model(family, seq_length))
    return special_ids({}, names, vocab=VOCAB, words=WORDS)


def samples(family: str, data: IndexedDataset, seq_length: int, seed: int = 1, **changes):
    shape = model(family, seq_length, **changes)
    return get_implementation(family).samples(SampleSource(data, shape, seed, special(family, seq_length), WORDS))


def packed(data, length, seed, number) -> list[int]:
    """The packed text of a sample, as long as the objective reads it."""
    return PackedSamples(data, length, seed).sample(number)[:-1].tolist()


def one(family, data, seq_length, seed, number) -> dict[str, list]:
    batch = samples(family, data, seq_length, seed).batch([number])
    return {name: field[0].tolist() for name, field in batch.items()}
