"""The indexed format against a reader written from its published layout, and against Megatron."""

import struct
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpctl.core.errors import InputError
from mpctl.train.data.indexed import IndexedDataset, IndexedWriter, token_dtype

U16, I32 = np.dtype("<u2"), np.dtype("<i4")
DOCUMENTS = [[5, 6, 7], [8], [65499, 0, 1, 2]]


def write(prefix: Path, documents, dtype=U16) -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        for tokens in documents:
            writer.add_document(np.array(tokens))
    return prefix


def read_by_layout(prefix: Path) -> list[list[int]]:
    """The layout of the .idx, field by field, with struct alone."""
    idx, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert idx[:9] == b"MMIDIDX\x00\x00"
    assert struct.unpack_from("<Q", idx, 9) == (1,)
    (code,) = struct.unpack_from("<B", idx, 17)
    letter, size = {1: "B", 4: "i", 8: "H"}[code], {1: 1, 4: 4, 8: 2}[code]
    n, m = struct.unpack_from("<QQ", idx, 18)
    lengths = struct.unpack_from(f"<{n}i", idx, 34)
    pointers = struct.unpack_from(f"<{n}q", idx, 34 + 4 * n)
    bounds = struct.unpack_from(f"<{m}q", idx, 34 + 12 * n)
    assert len(idx) == 34 + 12 * n + 8 * m
    assert len(tokens) == size * sum(lengths)
    assert (bounds[0], bounds[-1]) == (0, n)
    sequences = [
        list(struct.unpack_from(f"<{length}{letter}", tokens, pointer))
        for length, pointer in zip(lengths, pointers, strict=True)
    ]
    return [[*chain.from_iterable(sequences[a:b])] for a, b in pairwise(bounds)]


def message(prefix: Path) -> str:
    with pytest.raises(InputError) as caught:
        IndexedDataset(prefix)
    assert all(issue.hint and str(prefix) in issue.where for issue in caught.value.issues)
    return str(caught.value)


def patch(path: Path, offset: int, data: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(data)] = data
    path.write_bytes(raw)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=9), min_size=1, max_size=9),
    st.sampled_from(["<u1", "<u2", "<i4", ">u2"]),
)
def test_round_trip_and_independent_reader(tmp_path_factory, documents, dtype):
    prefix = write(tmp_path_factory.mktemp("indexed") / "a.b", documents, np.dtype(dtype))
    dataset = IndexedDataset(prefix)
    assert [dataset.document(i).tolist() for i in range(len(dataset))] == documents
    assert dataset.document_lengths.tolist() == [len(tokens) for tokens in documents]
    assert dataset.tokens == sum(map(len, documents))
    assert read_by_layout(prefix) == documents


def test_slices_and_bounds(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "x", DOCUMENTS))
    assert dataset.document(2, 1, 3).tolist() == [0, 1]
    assert dataset.document(2, 3).tolist() == [2]
    assert not dataset.document(0).flags.writeable
    for i in (-1, 3):
        with pytest.raises(IndexError, match="of 3"):
            dataset.document(i)


def test_token_type_follows_megatrons_bound():
    assert [token_dtype(size).name for size in (257, 65499, 65500)] == ["uint16", "uint16", "int32"]


def test_a_token_that_would_wrap_is_refused(tmp_path):
    with pytest.raises(InputError, match="3 to 65536 do not fit uint16"):
        write(tmp_path / "x", [[3, 65536]])
    assert not list(tmp_path.iterdir())


def test_interrupted_write_keeps_the_old_pair(tmp_path):
    prefix = write(tmp_path / "x", DOCUMENTS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(KeyboardInterrupt), IndexedWriter(prefix, I32) as writer:
        writer.add_document(np.array([1, 2]))
        assert Path(f"{prefix}.bin.part").exists()
        raise KeyboardInterrupt
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_stopped_between_the_two_files(tmp_path, monkeypatch, suffix):
    """Old index and new tokens have the same sizes here: only their absence can tell."""
    prefix, move = write(tmp_path / "x", [[1, 2], [3]]), Path.replace

    def replace(path: Path, target: Path) -> Path:
        if target.suffix == f".{suffix}":
            raise KeyboardInterrupt
        return move(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        write(prefix, [[4], [5, 6]])
    assert "found no x.idx" in message(prefix)
    assert not list(tmp_path.glob("*.part"))


def test_missing_files_are_named(tmp_path):
    assert "found no x.bin and no x.idx" in message(tmp_path / "x")
    write(tmp_path / "x", DOCUMENTS)
    (tmp_path / "x.bin").unlink()
    assert "found no x.bin, expected both" in message(tmp_path / "x")


def test_foreign_file(tmp_path):
    write(tmp_path / "x", DOCUMENTS)
    (tmp_path / "x.idx").write_bytes(b"\x80\x04PICKLED, NOT INDEXED" * 9)
    assert r"expected b'MMIDIDX\x00\x00'" in message(tmp_path / "x")


def test_files_of_another_size(tmp_path):
    prefix = write(tmp_path / "x", DOCUMENTS)
    index, tokens = (tmp_path / f"x.{suffix}" for suffix in ("idx", "bin"))
    whole = index.read_bytes(), tokens.read_bytes()
    for size, state in ((15, "truncated"), (0, "truncated"), (18, "too long")):
        tokens.write_bytes((whole[1] + b"\0\0")[:size])
        expected = f"x.bin: {state}: found {size} bytes, expected 16 (8 tokens in the index)"
        assert expected in message(prefix)
    for size in (0, 5, 33, 101):
        index.write_bytes(whole[0][:size])
        wanted = "102 (3 sequences, 4 boundaries)" if size > 33 else "at least 34"
        assert f"x.idx: truncated: found {size} bytes, expected {wanted}" in message(prefix)


def test_header_fields_that_lie(tmp_path):
    prefix, path = write(tmp_path / "x", DOCUMENTS), tmp_path / "x.idx"
    whole = path.read_bytes()
    for offset, data, found in (
        (9, struct.pack("<Q", 2), "found version 2, expected 1"),
        (17, b"\x07", "found token type code 7, expected an integer type"),
        (17, b"\x63", "found token type code 99, expected an integer type"),
        (18, struct.pack("<Q", 2**63), f"expected {34 + 12 * 2**63 + 8 * 4} (9223372036854775808 sequences"),
        (26, struct.pack("<Q", 2**40), f"expected {34 + 12 * 3 + 8 * 2**40} (3 sequences"),
        (34, struct.pack("<i", -3), "sequence 0 has a negative length"),
        (46, struct.pack("<q", 8), "sequence 0: found byte pointer 8, expected 0"),
        (54, struct.pack("<q", 2**62), "sequence 1: found byte pointer 4611686018427387904"),
        (70, struct.pack("<q", 1), "document boundaries do not run from 0 to 3"),
        (94, struct.pack("<q", 4), "document boundaries do not run from 0 to 3"),
        (78, struct.pack("<q", 9), "document boundaries go backwards"),
    ):
        path.write_bytes(whole)
        patch(path, offset, data)
        assert found in message(prefix)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 101), st.binary(min_size=1, max_size=8))
def test_no_damage_gets_past_as_another_error(tmp_path_factory, offset, data):
    folder = tmp_path_factory.mktemp("fuzz")
    write(folder / "x", DOCUMENTS)
    patch(folder / "x.idx", offset, data)
    try:
        dataset = IndexedDataset(folder / "x")
    except InputError:
        return
    assert sum(dataset.document(i).size for i in range(len(dataset))) == dataset.tokens


def test_sequences_of_a_document_read_as_one(tmp_path):
    """As Megatron's preprocessing with --split-sentences writes them: boundaries 0 2 3."""
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, 3, 3)
    body = struct.pack("<3i3q3q", 2, 1, 2, 0, 8, 12, 0, 2, 3)
    (tmp_path / "x.idx").write_bytes(header + body)
    (tmp_path / "x.bin").write_bytes(struct.pack("<5i", 1, 2, 3, 4, 5))
    dataset = IndexedDataset(tmp_path / "x")
    assert [dataset.document(i).tolist() for i in range(2)] == [[1, 2, 3], [4, 5]]


# Megatron itself, where it is installed ------------------------------------------------------


@pytest.fixture
def megatron():
    return pytest.importorskip(
        "megatron.core.datasets.indexed_dataset",
        reason="Megatron is no dependency: pip install megatron-core==0.16.1 to run this",
        exc_type=ImportError,
    )


@pytest.mark.parametrize("dtype", [U16, I32])
def test_megatron_reads_ours(tmp_path, megatron, dtype):
    theirs = megatron.IndexedDataset(str(write(tmp_path / "x", DOCUMENTS, dtype)))
    assert [theirs[i].tolist() for i in range(len(theirs))] == DOCUMENTS
    assert theirs.document_indices.tolist() == [0, 1, 2, 3]
    assert theirs.index.dtype == dtype.type
    assert theirs.get(2, offset=1, length=2).tolist() == [0, 1]


@pytest.mark.parametrize("vocab_size", [300, 65499, 65500, 128_000])
def test_we_read_megatrons(tmp_path, megatron, vocab_size):
    import torch

    dtype = megatron.DType.optimal_dtype(vocab_size)
    assert token_dtype(vocab_size) == dtype
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=dtype)
    for tokens in DOCUMENTS:
        builder.add_document(torch.tensor(tokens), [len(tokens)])
    builder.add_document(torch.tensor([1, 2, 3]), [2, 1])
    builder.finalize(str(tmp_path / "x.idx"))
    ours = IndexedDataset(tmp_path / "x")
    assert [ours.document(i).tolist() for i in range(len(ours))] == [*DOCUMENTS, [1, 2, 3]]


def test_same_bytes_as_megatron(tmp_path, megatron):
    import torch

    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16)
    for tokens in DOCUMENTS:
        builder.add_document(torch.tensor(tokens), [len(tokens)])
    builder.finalize(str(tmp_path / "a.idx"))
    write(tmp_path / "b", DOCUMENTS)
    for suffix in ("bin", "idx"):
        ours, theirs = (tmp_path / f"{name}.{suffix}" for name in "ba")
        assert ours.read_bytes() == theirs.read_bytes()
