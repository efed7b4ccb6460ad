"""Byte-level tokenizers, trained and loaded; ids of special tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from mpctl.core.errors import InputError, RunFailed
from mpctl.train.data.tokenizer import (
    added_tokens,
    encode,
    end_of_text_id,
    load_tokenizer,
    special_ids,
    train_apart,
    train_tokenizer,
    vocabulary_size,
)

TEXTS = [f"def function_{i}(value):\n    return value + {i}\n" for i in range(50)]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer(TEXTS, vocab_size=300)


def save(tmp_path: Path, tokenizer: Tokenizer, **changes) -> Path:
    content = json.loads(tokenizer.to_str()) | changes
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    return path


def test_training_merges_and_is_deterministic(trained):
    assert trained.to_str() == train_tokenizer(iter(TEXTS), vocab_size=300).to_str()
    assert vocabulary_size(trained) == 300
    assert len(encode(trained, [TEXTS[0]])[0]) < len(TEXTS[0]) / 2


@settings(max_examples=60, deadline=None)
@given(st.text())
@example("a<|endoftext|>b")
def test_any_text_comes_back_and_none_holds_end_of_text(trained, text):
    (ids,) = encode(trained, [text])
    assert trained.decode(ids, skip_special_tokens=False) == text
    assert end_of_text_id(trained) not in ids


def test_training_in_a_separate_process_gives_the_same(trained):
    calls = []
    text = train_apart(TEXTS, vocab_size=300, total=50, on_progress=lambda *call: calls.append(call))
    assert text == trained.to_str(pretty=True)
    assert calls == [*(("count words", i, 50) for i in range(1, 51)), ("learn merges", 0, 0)]


def new_children(before: set[psutil.Process]) -> set[psutil.Process]:
    """Child processes of this one that others, such as a test's fork server, have not started."""
    return set(psutil.Process().children()) - before


def test_a_killed_training_is_reported():
    before = new_children(set())

    def kill(stage: str, done: int, total: int) -> None:
        if stage == "learn merges":
            (child,) = new_children(before)
            child.kill()

    texts = [f"{i} words to merge {i * i}" for i in range(20_000)]  # seconds of work
    with pytest.raises(RunFailed, match="was killed by signal 9"):
        train_apart(texts, vocab_size=4096, total=0, on_progress=kill)


def test_a_stopped_training_leaves_no_process():
    def stop(stage: str, done: int, total: int) -> None:
        if stage == "learn merges":
            raise KeyboardInterrupt

    before = new_children(set())
    with pytest.raises(KeyboardInterrupt):
        train_apart(TEXTS, vocab_size=300, total=0, on_progress=stop)
    assert not new_children(before)


def test_smallest_vocabulary():
    assert vocabulary_size(train_tokenizer(TEXTS, vocab_size=257)) == 257
    with pytest.raises(InputError, match=r"256 entries do not hold .* \(use 257 or more\)"):
        train_tokenizer(TEXTS, vocab_size=256)
    with pytest.raises(InputError, match="256 entries"):
        train_apart(TEXTS, vocab_size=256, total=0, on_progress=lambda *call: None)


def test_saved_truncation_and_padding_do_not_cut_documents(tmp_path, trained):
    limits = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    loaded = load_tokenizer(save(tmp_path, trained, truncation=limits))
    assert encode(loaded, [TEXTS[0]]) == encode(trained, [TEXTS[0]])


@pytest.mark.parametrize("read", [load_tokenizer, added_tokens])
def test_missing_and_undecodable_files(tmp_path, read):
    (tmp_path / "b").write_bytes(b"\xff\xfe")
    for name in ("a", "b"):
        with pytest.raises(InputError, match="not readable"):
            read(tmp_path / name)


def test_other_names_of_end_of_text_and_none(tmp_path):
    vocabulary = {"[UNK]": 0, "x": 7}
    path = save(tmp_path, Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")))
    with pytest.raises(InputError, match=r"holds none of <\|endoftext\|>"):
        end_of_text_id(load_tokenizer(path))
    path = save(tmp_path, Tokenizer(models.WordLevel(vocabulary | {"</s>": 3}, unk_token="[UNK]")))
    assert end_of_text_id(load_tokenizer(path)) == 3
    assert vocabulary_size(load_tokenizer(path)) == 8


def test_a_tokenizer_that_cannot_encode():
    with pytest.raises(InputError, match="cannot encode the corpus"):
        encode(Tokenizer(models.WordLevel({"x": 0}, unk_token="[UNK]")), ["y"])


NAMES = ("[CLS]", "[SEP]", "[MASK]")


def test_reserved_ids_stay_above_the_text():
    assert special_ids({}, NAMES, vocab=100, words=97) == dict(zip(NAMES, (99, 98, 97), strict=True))
    known = special_ids({"[SEP]": 5}, NAMES, vocab=100, words=97)
    assert known == dict(zip(NAMES, (99, 5, 98), strict=True))
    with pytest.raises(InputError) as caught:
        special_ids({}, NAMES, vocab=100, words=98)
    (issue,) = caught.value.issues
    assert (issue.rule, issue.where) == ("special-tokens-fit", "model.vocab")
    assert "100 ids leave 2 free beside the tokenizer's 98" in issue.message
    assert "[CLS], [SEP], [MASK] need 3" in issue.message
    assert "use 101 or more" in issue.hint
    assert special_ids({"[CLS]": 3}, NAMES, vocab=100, words=98)["[MASK]"] == 98


def test_a_known_token_beyond_the_text_is_another_tokenizers():
    with pytest.raises(InputError, match=r"\[SEP\] has the id 97, but .* ids below 97"):
        special_ids({"[SEP]": 97}, NAMES, vocab=100, words=97)


def test_added_tokens_are_those_that_the_library_saves(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[MASK]", "[UNK]"])
    tokenizer.add_tokens([AddedToken("<é>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    expected = {name: tokenizer.token_to_id(name) for name in ("[MASK]", "[UNK]", "<é>")}
    assert added_tokens(tmp_path / "tokenizer.json") == expected
    path = tmp_path / "tokenizer.json"
    for content in ({}, {"added_tokens": []}, {"added_tokens": None}):
        path.write_text(json.dumps(content))
        assert added_tokens(path) == {}


@pytest.mark.parametrize(
    ("read", "contents"),
    [
        (load_tokenizer, ("", "[1]", '{"model": {}}', "\x00")),
        (
            added_tokens,
            (
                "",
                "[1]",
                "3",
                "[" * 100_000,
                '{"added_tokens": 3}',
                '{"added_tokens": [3]}',
                '{"added_tokens": ["ab"]}',
                '{"added_tokens": [{"id": 1}]}',
                '{"added_tokens": [{"id": -1, "content": "a"}]}',
                '{"added_tokens": [{"id": true, "content": "a"}]}',
                '{"added_tokens": [{"id": 1.0, "content": "a"}]}',
                '{"added_tokens": [{"id": 1, "content": null}]}',
                '{"added_tokens": [{"id": ' + "9" * 5000 + ', "content": "a"}]}',
            ),
        ),
    ],
)
def test_what_is_no_tokenizer(tmp_path, read, contents):
    path = tmp_path / "tokenizer.json"
    for content in contents:
        path.write_text(content)
        with pytest.raises(InputError, match=r"tokenizer\.json: not a tokenizer") as caught:
            read(path)
        assert caught.value.issues[0].hint


def test_a_launch_may_ask_without_numpy():
    imports = (
        "mpctl.train.data.tokenizer",
        *(f"mpctl.model.families.{family}.family" for family in ("gpt", "bert", "t5", "glm")),
    )
    code = f"import sys, {', '.join(imports)}; print({{'torch', 'numpy'}} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
