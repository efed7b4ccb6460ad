"""Special tokens: known ones keep their ids, the others come from the top of the vocabulary."""

import json
import subprocess
import sys

import pytest
from tokenizers import AddedToken, Tokenizer, models

from mpctl.data.special import added_tokens, special_ids
from mpctl.errors import InputError

NAMES = ("[CLS]", "[SEP]", "[MASK]")


def test_example_of_the_docstring():
    ids = special_ids({"[SEP]": 5, "<|endoftext|>": 0}, NAMES, vocab=100, words=97)
    assert ids == {"[CLS]": 99, "[SEP]": 5, "[MASK]": 98}
    assert list(ids) == list(NAMES)


def test_reserved_ids_stay_above_the_text():
    assert special_ids({}, NAMES, vocab=100, words=97) == {
        "[CLS]": 99,
        "[SEP]": 98,
        "[MASK]": 97,
    }
    with pytest.raises(InputError) as caught:
        special_ids({}, NAMES, vocab=100, words=98)
    (issue,) = caught.value.issues
    assert (issue.rule, issue.where) == ("special-tokens-fit", "model.vocab")
    assert "100 ids leave 2 free beside the tokenizer's 98" in issue.message
    assert "[CLS], [SEP], [MASK] need 3" in issue.message
    assert "use 101 or more" in issue.hint
    assert special_ids({"[CLS]": 3}, NAMES, vocab=100, words=98)["[MASK]"] == 98


def test_nothing_is_reserved_for_nobody():
    assert special_ids({}, (), vocab=50, words=80) == {}
    known = {name: i for i, name in enumerate(NAMES)}
    assert special_ids(known, NAMES, vocab=80, words=80) == known


def test_many_names_are_told_in_short():
    names = [f"<extra_id_{i}>" for i in range(28)]
    with pytest.raises(InputError, match=r"<extra_id_0>, <extra_id_1> \.\.\. <extra_id_27> need"):
        special_ids({}, names, vocab=100, words=90)


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


def test_none_is_none(tmp_path):
    path = tmp_path / "tokenizer.json"
    for content in ({}, {"added_tokens": []}, {"added_tokens": None}):
        path.write_text(json.dumps(content))
        assert added_tokens(path) == {}


@pytest.mark.parametrize(
    "content",
    [
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
    ],
    ids=lambda content: content[:50],
)
def test_what_is_no_tokenizer(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"tokenizer\.json: not a tokenizer") as caught:
        added_tokens(path)
    assert caught.value.issues[0].hint


def test_missing_and_undecodable_files(tmp_path):
    (tmp_path / "b").write_bytes(b"\xff\xfe")
    for name in ("a", "b"):
        with pytest.raises(InputError, match="not readable"):
            added_tokens(tmp_path / name)


def test_a_launch_may_ask_without_numpy():
    imports = (
        "mpctl.data.special",
        *(f"mpctl.families.{family}.special" for family in ("gpt", "bert", "t5", "glm")),
    )
    code = f"import sys, {', '.join(imports)}; print({{'torch', 'numpy'}} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
