"""Conversations become tokens, masks and rows; what cannot be used is named by file and line."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mpctl.core.errors import InputError
from mpctl.train.data.chat_prepare import ChatSettings, prepare_chat
from mpctl.train.data.chat_samples import ChatRows, ChatSamples, row_texts
from mpctl.train.data.manifest import open_prepared
from mpctl.train.data.tokenizer import load_tokenizer
from tests.train.runtime.chat import LENGTH, make_chat_data, make_tokenizer, write_lines

USER, ASSISTANT = {"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "3"}
GOOD = {"messages": [USER, ASSISTANT]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("chat") / "tokenizer")


def prepare(folder: Path, tokenizer: Path, *records: object, **changes):
    """Prepare records, with good ones in front, so that two are held back and trained on."""
    path = folder / "lines.jsonl"
    texts = [record if isinstance(record, str) else json.dumps(record) for record in (GOOD, GOOD, *records)]
    path.write_text("\n".join(texts))
    return prepare_chat([path], folder / "out", ChatSettings(str(tokenizer), **({"seq_length": 32} | changes)))


def shown(prepared, row: int = 0) -> list[list[tuple[str, bool]]]:
    return [[(run["text"], run["counted"]) for run in runs] for runs in row_texts(prepared, row)]


def documents(prepared) -> list[tuple[str, str]]:
    """The text of every conversation of both splits, and what of it counts."""
    model, found = load_tokenizer(prepared.tokenizer_path), []
    assert prepared.chat is not None
    for split in (prepared.train, prepared.validation):
        rows = ChatRows(split.open(), prepared.chat.seq_length)
        for i in range(len(rows.tokens)):
            ids, mask = rows.tokens.document(i), rows.masks.document(i)
            texts = [model.decode(list(some), skip_special_tokens=False) for some in (ids, ids[mask == 1])]
            found.append(tuple(texts))
    return found


def test_what_is_trained(tmp_path: Path, tokenizer: Path) -> None:
    prepared = prepare(tmp_path, tokenizer, packing="none")
    assert shown(prepared) == [[("<u>1 + 2?\n<a>", False), ("3\n", True)]]
    assert prepared.chat is not None and prepared.chat.splits["train"].rows == 1


def test_every_form_of_a_line(tmp_path: Path, tokenizer: Path) -> None:
    share = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    texts = {"prompt": "p q", "completion": " r"}
    lists = {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]}
    found = documents(prepare(tmp_path, tokenizer, share, texts, lists))
    assert ("<u>a\n<a>b\n", "b\n") in found
    assert ("p q r<|endoftext|>", " r<|endoftext|>") in found
    assert ("<u>1 + 2?\n<a>3\n<u>1 + 2?\n<a>3\n", "3\n") in found  # the last of its turns alone


def test_loss_on_all(tmp_path: Path, tokenizer: Path) -> None:
    only_user = {"messages": [USER]}
    assert all(text == trained for text, trained in documents(prepare(tmp_path, tokenizer, only_user, loss_on="all")))


def test_end_and_beginning_are_not_doubled(tmp_path: Path, tokenizer: Path) -> None:
    folder = shutil.copytree(tokenizer, tmp_path / "tokenizer")
    model = load_tokenizer(folder / "tokenizer.json")
    model.add_special_tokens(["<s>"])
    from tokenizers.processors import TemplateProcessing

    model.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", model.token_to_id("<s>"))])
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "<|endoftext|>"}')
    plain = {"prompt": "p", "completion": " r"}
    spelled = {"prompt": "<s>p", "completion": " r<|endoftext|>"}
    found = documents(prepare(tmp_path, folder, plain, spelled))
    assert found.count(("<s>p r<|endoftext|>", " r<|endoftext|>")) == 2
    assert ("<u>1 + 2?\n<a>3\n", "3\n") in found  # what a template renders gets nothing more


BAD = {
    "no role": ({"messages": [{"content": "a"}]}, "chat-record", r"messages\[0\] lacks a role"),
    "no content": ({"messages": [USER, {"role": "assistant"}]}, "chat-record", r"messages\[1\] lacks content"),
    "no messages": ({"text": "a"}, "chat-record", "neither messages nor prompt and completion; keys there: text"),
    "empty": ({"messages": []}, "chat-record", "messages is empty"),
    "no list": ({"messages": "a"}, "chat-record", "messages is no list of messages"),
    "no completion": ({"prompt": "a", "completion": ""}, "chat-record", "completion is empty"),
    "no JSON": ('{"messages": [', "chat-json", "is no JSON object"),
    "no object": ("[1]", "chat-json", "is no JSON object"),
    "masked": ({"messages": [USER]}, "chat-all-masked", "the loss counts no token of it"),
    "too long": ({"messages": [USER, {"role": "assistant", "content": "3 " * 40}]}, "chat-too-long", "more than 32"),
    "template": ({"messages": [{"role": "judge", "content": "a"}]}, "chat-template", "failed: no role judge"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path: Path, tokenizer: Path, name: str) -> None:
    record, rule, words = BAD[name]
    with pytest.raises(InputError, match=words) as caught:
        prepare(tmp_path, tokenizer, record)
    (issue,) = caught.value.issues
    assert (issue.rule, issue.where) == (rule, f"{tmp_path / 'lines.jsonl'}:3") and issue.hint
    assert [path.name for path in tmp_path.iterdir()] == ["lines.jsonl"]


def test_a_template_says_what_is_wrong(tmp_path: Path, tokenizer: Path) -> None:
    strict = tmp_path / "strict.jinja"
    strict.write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match=r"lines.jsonl:1: the chat template failed: roles must alternate"):
        prepare(tmp_path, tokenizer, template=str(strict))


def test_a_tokenizer_without_template(tmp_path: Path, tokenizer: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copyfile(tokenizer / "tokenizer.json", bare / "tokenizer.json")
    with pytest.raises(InputError) as caught:
        prepare(tmp_path, bare)
    assert "--template FILE" in (caught.value.issues[0].hint or "") and len(caught.value.issues) == 1
    assert prepare(tmp_path, bare, template=str(tokenizer / "chat_template.jinja")).chat


def test_many_bad_lines_are_counted(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(InputError) as caught:
        prepare(tmp_path, tokenizer, *["x"] * 15)
    assert len(caught.value.issues) == 11 and "5 more lines" in str(caught.value.issues[-1])


@pytest.mark.parametrize(("overflow", "most"), [("drop", 2), ("truncate", 3), ("split", 4)])
def test_overflow_is_counted(tmp_path: Path, tokenizer: Path, overflow: str, most: int) -> None:
    long = {"messages": [USER, {"role": "assistant", "content": "3 " * 40}]}
    prepared = prepare(tmp_path, tokenizer, long, overflow=overflow, packing="none", seed=2)
    assert prepared.chat is not None
    splits = prepared.chat.splits.values()
    assert sum(split.too_long for split in splits) == 1
    assert sum(split.rows for split in splits) == most


def test_the_same_lines_give_the_same_bytes(tmp_path: Path) -> None:
    first = make_chat_data(tmp_path)
    for path in first.iterdir():
        path.rename(tmp_path / path.name)
    second = make_chat_data(tmp_path)
    for path in second.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_packed_gz_files_are_read(tmp_path: Path, tokenizer: Path) -> None:
    import gzip

    path = write_lines(tmp_path / "a.jsonl")
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    settings = ChatSettings(str(tokenizer), LENGTH)
    one, other = (prepare_chat([source], tmp_path / source.stem, settings) for source in (path, packed))
    assert one.files["train.bin"] == other.files["train.bin"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_chat_data(tmp_path_factory.mktemp("data"))


def test_rows(data: Path) -> None:
    prepared = open_prepared(data, hashes=True)
    assert prepared.chat is not None
    split, rows = prepared.chat.splits["train"], ChatRows(prepared.train.open(), LENGTH)
    assert (len(rows), rows.counted.sum()) == (split.rows, split.counted)
    assert split.tokens == prepared.train.tokens and split.tokens / (split.rows * LENGTH) > 0.85
    assert sorted(piece[0] for i in range(len(rows)) for piece in rows.pieces(i)) == list(range(len(rows.tokens)))
    row = rows.row(0)
    starts = np.flatnonzero(row["places"] == 0)
    for (document, *_), start in zip(rows.pieces(0), starts, strict=False):
        ids, mask = rows.tokens.document(document), rows.masks.document(document)
        stop = start + len(ids)
        assert (row["tokens"][start:stop] == ids).all() and (row["places"][start:stop] == np.arange(len(ids))).all()
        assert (row["targets"][start : stop - 1] == ids[1:]).all() and (row["mask"][start : stop - 1] == mask[1:]).all()
        assert row["mask"][stop - 1] == 0  # the next token is another conversation's


def test_rows_longer_than_the_models_are_refused(data: Path) -> None:
    with pytest.raises(InputError, match=r"model.seq_length: 32, but a row of .*packs holds \d+ tokens"):
        ChatRows(open_prepared(data).train.open(), 32)


def test_a_step_weighs_each_counted_token_alike(data: Path) -> None:
    rows = ChatRows(open_prepared(data).train.open(), LENGTH)
    samples = ChatSamples(rows, seed=1, together=4)
    for step in (0, 1, len(rows) // 4):  # the last one straddles two epochs
        weights = samples.batch(range(4 * step, 4 * step + 4))["weights"]
        assert weights.sum() == pytest.approx(4) and len(set(weights[weights > 0])) == 1
        alone = np.concatenate([samples.batch([4 * step + i])["weights"] for i in range(4)])
        assert (alone == weights).all()
    whole = ChatSamples(rows, seed=1, together=10**9, shuffle=False)
    assert whole.batch(range(len(rows)))["weights"].sum() == pytest.approx(len(rows))


@pytest.mark.parametrize(
    ("name", "position", "value"),
    [("train.packs", 0, 10**6), ("train.packs", 1, 40), ("train.packs", 2, 0), ("train.packs", 3, -1)],
)
def test_damaged_rows_are_refused(tmp_path: Path, data: Path, name: str, position: int, value: int) -> None:
    copy = shutil.copytree(data, tmp_path / "data")
    pieces = np.memmap(copy / f"{name}.bin", "<i4", "r+")
    pieces[position] = value
    pieces.flush()
    with pytest.raises(InputError, match="piece"):
        ChatRows(open_prepared(copy).train.open(), LENGTH)
    with pytest.raises(InputError, match="sha256"):
        open_prepared(copy, hashes=True)
