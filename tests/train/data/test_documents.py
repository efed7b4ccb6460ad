"""How a corpus becomes documents, and which of them validate."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.core.errors import InputError
from mpctl.train.data.corpus import find_files
from mpctl.train.data.documents import (
    FEWEST,
    LONGEST,
    SHARE,
    TextCut,
    choose_cut,
    count_corpus,
    split_chunks,
    splitmix64,
    validates,
)
from mpctl.train.data.texts import Findings, Reading


def documents(*paths) -> list[str]:
    corpus = count_corpus(find_files(paths), lambda *_: None, Reading(), Findings())
    return list(corpus.read())


def split_text(text, pieces):
    return list(split_chunks([text], len(text), pieces))


@given(st.text("ab \n", min_size=1, max_size=300), st.integers(1, 40), st.data())
def test_pieces_are_the_text_however_it_is_streamed(text, size, data):
    count = data.draw(st.integers(1, len(text)))
    pieces = split_text(text, count)
    assert "".join(pieces) == text
    assert len(pieces) == count
    assert all(pieces)
    assert max(map(len, pieces)) <= 2 * -(-len(text) // count)
    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    assert list(split_chunks(chunks, len(text), count)) == pieces


@pytest.mark.parametrize("length", [99, 101])
def test_a_stream_of_another_length_is_a_change(length):
    with pytest.raises(InputError, match="100 characters now"):
        list(split_chunks(["x" * 60, "y" * 40], length, 5))


def test_pieces_end_with_lines_else_words_else_anywhere():
    assert split_text("one\ntwo\nthree\nfour\n", 3) == ["one\ntwo\n", "three\n", "four\n"]
    assert split_text("one two three four", 3) == ["one two ", "three ", "four"]
    assert split_text("abcdef", 3) == ["ab", "cd", "ef"]


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=40), st.data())
def test_there_are_sixteen_when_there_is_text(lengths, data):
    is_record = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    cut, found = choose_cut(lengths, is_record)
    assert found == sum(map(cut.count, lengths, is_record))
    assert found >= FEWEST or sum(lengths) < 128 * FEWEST
    assert found >= len(lengths)
    if cut == TextCut():  # whole lines, and files up to the limit
        assert all(
            cut.count(n, record) == (1 if record or n <= LONGEST else -(-n // SHARE))
            for n, record in zip(lengths, is_record, strict=True)
        )


def test_a_long_file_among_many(tmp_path):
    line = "x" * 63 + "\n"
    paths = [tmp_path / f"{i:02}.txt" for i in range(17)]
    for path in paths:
        path.write_text("short\n")
    paths[3].write_text(line * (LONGEST // 64))
    assert len(documents(*paths)) == 17
    paths[3].write_text(line * (LONGEST // 64 + 1))
    found = documents(*paths)
    assert len(found) == 19
    assert "".join(found[3:6]) == paths[3].read_text()
    assert all(piece.endswith("\n") and len(piece) < SHARE for piece in found[3:6])


def test_lines_of_jsonl_are_not_cut_unless_they_are_few(tmp_path):
    path = tmp_path / "a.jsonl"
    long = json.dumps({"text": "word " * LONGEST})
    path.write_text("\n".join([long] * 16))
    assert len(documents(path)) == 16
    path.write_text("\n".join([long] * 15))
    found = documents(path)
    assert len(found) == 30
    assert "".join(found) == "word " * LONGEST * 15


@pytest.mark.parametrize("separator", ["\n", " ", ""])
def test_one_small_file(tmp_path, separator):
    path = tmp_path / "a.txt"
    text = separator.join(str(i) for i in range(1000))
    path.write_text(text)
    found = documents(path)
    assert len(found) in (FEWEST, FEWEST + 1)
    assert "".join(found) == text
    assert all(piece.endswith(separator) for piece in found[:-1])


def test_too_little_text_reports_how_much_is_needed(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x" * 128)
    with pytest.raises(InputError, match="found 1 document, need 2") as caught:
        documents(path)
    assert "from 256 characters on" in caught.value.issues[0].hint
    path.write_text("x" * 256)
    assert len(documents(path)) == 2


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
