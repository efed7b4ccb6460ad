"""Prepared data is complete and repeatable, or absent."""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mpctl.core.errors import InputError
from mpctl.train.data.extend import EXTENSION, read_extension
from mpctl.train.data.manifest import FILES, open_prepared, open_validations
from mpctl.train.data.prepare import prepare
from mpctl.train.data.samples import PackedSamples
from mpctl.train.data.tokenizer import load_tokenizer
from tests.train.data.languages import ENGLISH, FRENCH, write_corpus
from tests.train.data.reading import find_paths, read_all

ALL = sorted([*FILES, "data.json"])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    for i in range(60):
        text = f"Document {i} counts {' '.join(str(i * k) for k in range(40))}.\n"
        (root / f"{i}.txt").write_text(text)
    (root / "end.txt").write_text("spelled <|endoftext|> here\n")
    return root


@pytest.fixture(scope="module")
def ready(tmp_path_factory, corpus) -> Path:
    """The corpus prepared, with a tokenizer trained on it. Not to be changed."""
    return make(corpus, tmp_path_factory.mktemp("ready") / "data").path


@pytest.fixture(scope="module")
def quick(ready):
    """As `make`, with that tokenizer: nothing is trained."""
    return partial(make, tokenizer=ready / "tokenizer.json")


@pytest.fixture
def whole(tmp_path, ready) -> Path:
    """A copy of the prepared data, to be changed."""
    return shutil.copytree(ready, tmp_path / "data")


def make(corpus: Path, out: Path, **changes):
    arguments = {"sources": [corpus], "vocab_size": 300, "validation_fraction": 0.1}
    return prepare(**(arguments | {"out": out} | changes))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def issues_of(call) -> dict[str, str]:
    with pytest.raises(InputError) as caught:
        call()
    assert all(issue.hint for issue in caught.value.issues)
    return {issue.rule: str(issue) for issue in caught.value.issues}


def test_python_stdlib(tmp_path):
    calls = []
    prepared = prepare(
        sources=["python-stdlib"],
        out=tmp_path / "a" / "data",
        vocab_size=512,
        max_bytes=300_000,
        on_progress=lambda *call: calls.append(call),
    )
    assert sorted(path.name for path in prepared.path.iterdir()) == ALL
    assert prepared == open_prepared(prepared.path, hashes=True)
    assert 0 < prepared.corpus["bytes"] <= 300_000
    assert prepared.train.documents + prepared.validation.documents == prepared.corpus["documents"]
    assert prepared.train.tokens > 30_000
    assert PackedSamples(prepared.train.open(), 128, seed=1).sample(0).max() < 512
    stages = list(dict.fromkeys(stage for stage, _, _ in calls))
    assert stages == ["read", "count words", "learn merges", "encode"]
    for stage in stages:
        done = [(done, total) for name, done, total in calls if name == stage]
        assert all(a < b for a, b in pairwise(done))
        assert done[-1][0] == done[-1][1]


def test_every_document_comes_back_with_its_end(ready, corpus):
    prepared = open_prepared(ready)
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    found = []
    for split in (prepared.train, prepared.validation):
        data = split.open()
        assert (len(data), data.tokens) == (split.documents, split.tokens)
        for i in range(len(data)):
            *ids, end = data.document(i).tolist()
            assert end == prepared.end_of_text_id
            assert end not in ids
            found.append(tokenizer.decode(ids))
    assert sorted(found) == sorted(read_all(find_paths([corpus])))
    assert prepared.validation.documents > 1


def test_same_input_same_bytes(tmp_path, corpus, ready, quick):
    make(corpus, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(ready)
    quick(corpus, tmp_path / "other", seed=1)
    assert contents(tmp_path / "other")["train.bin"] != contents(ready)["train.bin"]


def test_the_manifest_lists_the_files(ready, corpus):
    manifest = json.loads((ready / "data.json").read_text())
    assert manifest["schema"] == "mpctl.data/1"
    assert manifest == open_prepared(ready).as_dict()
    assert manifest["sources"] == [str(corpus)]
    assert manifest["corpus"]["texts"] == manifest["corpus"]["documents"] == 61
    assert manifest["settings"] == {
        "vocab_size": 300,
        "tokenizer": None,
        "extend_tokenizer": False,
        "validation_fraction": 0.1,
        "max_bytes": None,
        "seed": 1234,
        "text_key": "text",
        "encoding": "utf-8",
    }
    assert (manifest["skipped"], manifest["undecodable"]["count"]) == ({}, 0)
    sizes = {name: len(data) for name, data in contents(ready).items() if name in FILES}
    assert {name: file["bytes"] for name, file in manifest["files"].items()} == sizes


def test_a_named_tokenizer_is_copied_to_the_byte(tmp_path, corpus, ready):
    first, path = open_prepared(ready), tmp_path / "given.json"
    path.write_text(first.tokenizer_path.read_text() + "  \n")
    second = make(corpus, tmp_path / "two", tokenizer=path, vocab_size=70_000)
    assert second.tokenizer_path.read_bytes() == path.read_bytes()
    assert (second.dtype, second.vocab_size, second.tokenizer_vocab_size) == ("int32", 70_000, 300)
    one, two = first.train.open(), second.train.open()
    assert all((one.document(i) == two.document(i)).all() for i in range(len(one)))
    issues = issues_of(lambda: make(corpus, tmp_path / "three", tokenizer=path, vocab_size=299))
    assert "has 300 entries, data.vocab_size is 299" in issues["tokenizer-too-large"]
    assert not (tmp_path / "three").exists()


def test_lines_are_documents_and_a_long_file_is_several(tmp_path, quick):
    """The file is as long as Tiny Shakespeare, the student's first corpus."""
    lines, file = tmp_path / "a.jsonl", tmp_path / "input.txt"
    lines.write_text("\n".join(json.dumps({"text": f"line {i} " * 20}) for i in range(30)))
    found = quick(lines, tmp_path / "lines")
    assert found.train.documents + found.validation.documents == 30
    size = lines.stat().st_size
    assert found.corpus == {"files": 1, "texts": 30, "documents": 30, "bytes": size}
    text = "".join(f"{i}: to be, or not to be {i * i}\n" for i in range(32_000))[:1_115_394]
    file.write_text(text)
    prepared = quick(file, tmp_path / "file", validation_fraction=0.02)
    assert (prepared.corpus["texts"], prepared.corpus["documents"]) == (1, 18)
    assert (prepared.train.documents, prepared.validation.documents) == (17, 1)
    assert 0.03 < prepared.validation.tokens / prepared.train.tokens < 0.1
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    held_back = tokenizer.decode(prepared.validation.open().document(0).tolist())
    assert held_back in text
    assert held_back.endswith("\n")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, "no text found"),
        ({"a.txt": "alone " * 20}, "found 1 document, need 2"),
        ({"a.txt": "alone " * 50}, "need at least 256"),
        ({"a.txt": " \n", "b.txt": "\t"}, "found no document"),
        ({"a.txt": "x", "b.txt": "y"}, "need at least 256"),
        ({"a.jsonl": "nope\n", "b.jsonl": "[]\n"}, "2 lines without a JSON object"),
    ],
)
def test_unusable_corpus_leaves_nothing(tmp_path, quick, files, found):
    (tmp_path / "in").mkdir()
    for name, text in files.items():
        (tmp_path / "in" / name).write_text(text)
    assert found in "".join(issues_of(lambda: quick(tmp_path / "in", tmp_path / "data")).values())
    assert not (tmp_path / "data").exists()


def test_all_bad_settings_at_once(tmp_path, corpus):
    bad = {"validation_fraction": 1.0, "max_bytes": 0, "seed": -1, "vocab_size": 0}
    with pytest.raises(InputError) as caught:
        make(corpus, tmp_path / "data", **bad)
    wheres = {issue.where.removeprefix("data.") for issue in caught.value.issues}
    assert wheres == set(bad)


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("read", RuntimeError),
        ("count words", KeyboardInterrupt),
        ("learn merges", KeyboardInterrupt),
        ("encode", KeyboardInterrupt),
        ("encode", RuntimeError),
    ],
)
def test_interruption_leaves_nothing(tmp_path, corpus, whole, stage, error):
    def stop(name: str, done: int, total: int) -> None:
        if name == stage:
            raise error

    before, prepared = contents(whole), open_prepared(whole)
    with pytest.raises(error):
        make(corpus, tmp_path / "new", on_progress=stop)
    assert not (tmp_path / "new").exists()
    with pytest.raises(error):
        make(corpus, whole, on_progress=stop, overwrite=True, seed=1)
    assert contents(whole) == before
    assert open_prepared(whole, hashes=True) == prepared


KILLED = """
import os, signal, sys
from pathlib import Path
from mpctl.train.data.prepare import prepare

def progress(stage, done, total):
    if stage == "encode":
        os.kill(os.getpid(), signal.SIGKILL)

prepare(sources=[sys.argv[1]], out=Path(sys.argv[2]), vocab_size=300, on_progress=progress)
"""


def test_a_killed_run_does_not_look_prepared(tmp_path, corpus, quick):
    out = tmp_path / "data"
    command = [sys.executable, "-c", KILLED, str(corpus), str(out)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
    assert (out / ".preparing").is_dir()
    assert "holds no data.json" in issues_of(lambda: open_prepared(out))["data-not-prepared"]
    quick(corpus, out)
    assert sorted(path.name for path in out.iterdir()) == ALL


@pytest.mark.parametrize("name", ALL)
def test_stopped_between_old_and_new(whole, corpus, quick, monkeypatch, name):
    move = Path.replace

    def replace(path: Path, target: Path) -> Path:
        if target == whole / name:
            raise KeyboardInterrupt
        return move(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        quick(corpus, whole, overwrite=True, seed=1)
    assert "data-not-prepared" in issues_of(lambda: open_prepared(whole))


def test_an_occupied_directory_is_refused_and_its_own_files_are_kept(tmp_path, corpus, quick):
    out = tmp_path / "data"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    (out / EXTENSION).write_text("{}")  # of that name, and not ours
    refused = issues_of(lambda: quick(corpus, out))["data-occupied"]
    assert "already holds extension.json, thesis.tex" in refused
    kept = contents(out)
    quick(corpus, out, overwrite=True)
    assert kept.items() <= contents(out).items()
    assert "already holds data.json" in issues_of(lambda: quick(corpus, out))["data-occupied"]
    assert open_prepared(quick(corpus, out, overwrite=True, seed=2).path).settings["seed"] == 2


def test_earlier_output_is_no_source(tmp_path, quick):
    for i in range(9):
        (tmp_path / f"{i}.txt").write_text(f"text {i} " * 50)
    out = quick(tmp_path, tmp_path / "data").path
    issues = issues_of(lambda: quick(tmp_path, out, overwrite=True))
    assert "outside the sources" in issues["data-out"]
    assert open_prepared(out).corpus["files"] == 9


def test_a_file_or_a_busy_directory_as_out(tmp_path, corpus, quick):
    (tmp_path / "file").write_text("x")
    assert "not usable" in issues_of(lambda: quick(corpus, tmp_path / "file"))["data-out"]
    refused = {}

    def second(stage: str, done: int, total: int) -> None:
        if not refused:
            refused.update(issues_of(lambda: quick(corpus, tmp_path / "data", overwrite=True)))

    quick(corpus, tmp_path / "data", on_progress=second)
    assert "another process" in refused["data-busy"]


RECORD = json.dumps({"text": "some words " * 30}) + "\n"


@pytest.mark.parametrize(
    ("name", "text", "changed", "words"),
    [
        ("3.txt", "some text " * 35, " ", "1 characters now, of 350 a moment ago"),
        ("a.jsonl", RECORD * 30, RECORD * 29, "documents now, "),
    ],
)
def test_a_corpus_that_changes_meanwhile(tmp_path, quick, name, text, changed, words):
    (tmp_path / "in").mkdir()
    for i in range(19):
        (tmp_path / "in" / f"{i}.txt").write_text(f"text {i} " * 50)
    (tmp_path / "in" / name).write_text(text)

    def change(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("read", total):
            (tmp_path / "in" / name).write_text(changed)

    call = lambda: quick(tmp_path / "in", tmp_path / "data", on_progress=change)  # noqa: E731
    assert words in issues_of(call)["corpus-changed"]


def test_what_differs_from_the_manifest(whole):
    tokens = np.fromfile(whole / "train.bin", "<u2")
    tokens[5] ^= 1
    tokens.tofile(whole / "train.bin")
    open_prepared(whole)
    issues = issues_of(lambda: open_prepared(whole, hashes=True))
    assert "train.bin: its sha256 differs" in issues["data-file"]
    manifest = json.loads((whole / "data.json").read_text())
    manifest["splits"]["train"]["tokens"] += 1
    (whole / "data.json").write_text(json.dumps(manifest))
    assert "the manifest says" in issues_of(lambda: open_prepared(whole))["data-file"]
    (whole / "train.bin").unlink()
    (whole / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError) as caught:
        open_prepared(whole)
    wheres = [Path(issue.where).name for issue in caught.value.issues]
    assert wheres == ["train.bin", "tokenizer.json"]


def test_damaged_manifests(whole):
    manifest = json.loads((whole / "data.json").read_text())
    changes = (
        {"schema": "mpctl.data/2"},
        {"files": {}},
        {"vocab_size": "300"},
        {"vocab_size": -1},
        {"splits": None},
        {"tokenizer_sha256": "0"},
    )
    texts = ["", "{", "[]", "[" * 100_000, "x" * 2_000_000, "\x00"]
    for text in (*texts, *(json.dumps(manifest | change) for change in changes)):
        (whole / "data.json").write_text(text)
        assert "damaged manifest" in issues_of(lambda: open_prepared(whole))["data-manifest"]


# ---------------------------------------------------------------- an extended tokenizer


@pytest.fixture(scope="module")
def english(tmp_path_factory) -> Path:
    """Prepared with a vocabulary of 400 entries."""
    root = tmp_path_factory.mktemp("english")
    return make(write_corpus(root / "text", ENGLISH), root / "data", vocab_size=400).path


@pytest.fixture(scope="module")
def french(tmp_path_factory, english) -> Path:
    """Prepared with those 400 and 100 new ones."""
    root = tmp_path_factory.mktemp("french")
    text = write_corpus(root / "text", FRENCH)
    return make(text, root / "data", vocab_size=500, tokenizer=english, extend=True).path


def test_prepared_data_know_what_they_extend(english, french):
    old, new = open_prepared(english), open_prepared(french, hashes=True)
    assert sorted(path.name for path in french.iterdir()) == sorted([*ALL, EXTENSION])
    assert (new.vocab_size, new.tokenizer_vocab_size, len(new.extension.pieces)) == (500, 500, 100)
    assert new.extension.old_tokenizer_sha256 == old.tokenizer_sha256
    assert new.extension == read_extension(french / EXTENSION)
    manifest = json.loads((french / "data.json").read_text())
    assert manifest == new.as_dict()
    assert manifest["schema"] == "mpctl.data/1"
    assert manifest["extended_from"] == {"vocab_size": 400, "tokenizer_sha256": old.tokenizer_sha256}
    assert manifest["settings"]["extend_tokenizer"] is True
    assert "extended_from" not in old.as_dict()
    assert old.extension is None


def test_new_text_is_shorter_than_with_the_old_tokenizer(tmp_path, english, french):
    text = french.parent / "text"
    before = make(text, tmp_path / "old", vocab_size=400, tokenizer=english)
    after = open_prepared(french)
    assert after.train.tokens < 0.65 * before.train.tokens
    assert before.train.documents == after.train.documents
    new = load_tokenizer(after.tokenizer_path)
    end = after.end_of_text_id
    spelled = [new.decode([i for i in after.train.open().document(k) if i != end]) for k in (0, 1)]
    texts = read_all(find_paths([text]))
    assert all(found in texts for found in spelled)


def test_pieces_are_learned_on_the_training_split_alone(tmp_path, english):
    """A word that is only in a held-back document becomes no piece."""
    text = write_corpus(tmp_path / "text", FRENCH)
    first = make(text, tmp_path / "a", vocab_size=410, tokenizer=english, extend=True)
    held = load_tokenizer(first.tokenizer_path).decode(first.validation.open().document(0).tolist())
    (place,) = [p for p in text.iterdir() if p.read_text() == held]
    place.write_text(held + "zzyzx " * 400)
    again = make(text, tmp_path / "b", vocab_size=410, tokenizer=english, extend=True)
    assert again.tokenizer_sha256 == first.tokenizer_sha256
    assert again.validation.tokens > first.validation.tokens


def test_the_extension_goes_where_its_tokenizer_goes(tmp_path, english, french):
    """Old text prepared with it, to check the old language, or to train on both."""
    text = english.parent / "text"
    for given in (french, french / "tokenizer.json"):
        again = make(text, tmp_path / "x", vocab_size=500, tokenizer=given, overwrite=True)
        assert again.extension == open_prepared(french).extension
    same = make(text, tmp_path / "x", vocab_size=400, tokenizer=english, overwrite=True)
    assert same.extension is None
    assert sorted(path.name for path in same.path.iterdir()) == ALL
    assert open_validations(open_prepared(english), {"x": same.path}) == {"x": same}


def test_an_interrupted_extension_leaves_nothing(tmp_path, english, french):
    for stage in ("count words", "learn pieces", "encode"):

        def stop(name: str, done: int, total: int, stage: str = stage) -> None:
            if name == stage:
                raise KeyboardInterrupt

        arguments = {"vocab_size": 500, "tokenizer": english, "extend": True, "on_progress": stop}
        with pytest.raises(KeyboardInterrupt):
            make(french.parent / "text", tmp_path / "data", **arguments)
        assert not (tmp_path / "data").exists()


def test_bad_settings_of_an_extension(tmp_path, corpus, english):
    out = tmp_path / "data"
    assert "name a tokenizer" in issues_of(lambda: make(corpus, out, extend=True))["data-setting"]
    small = {"tokenizer": english, "extend": True, "vocab_size": 400}
    assert "use 401 or more" in issues_of(lambda: make(corpus, out, **small))["vocab-too-small"]
    gone = {"tokenizer": tmp_path, "extend": True}
    assert "not readable" in issues_of(lambda: make(corpus, out, **gone))["tokenizer-unreadable"]
    assert not out.exists()


def test_an_extension_that_differs_from_the_manifest(tmp_path, french):
    folder = shutil.copytree(french, tmp_path / "data")
    path = folder / EXTENSION
    text = path.read_text()
    path.write_text(text[:-40])
    assert "bytes, the manifest says" in issues_of(lambda: open_prepared(folder))["data-file"]
    path.write_text(text.replace("[[", "[[ ", 1)[:-2] + "\n")  # as long, and no JSON
    assert "damaged" in issues_of(lambda: open_prepared(folder))["data-extension"]
    other = json.loads(text)
    other["tokenizer_sha256"] = "0" * 64
    path.write_text(json.dumps(other) + "\n")
    assert "is of another" in issues_of(lambda: open_prepared(folder))["data-extension"]
    path.unlink()
    assert "missing" in issues_of(lambda: open_prepared(folder))["data-file"]


def test_validations_share_the_tokenizer(tmp_path, english, french):
    main = open_prepared(french)
    kept = make(english.parent / "text", tmp_path / "kept", vocab_size=500, tokenizer=french)
    opened = open_validations(main, {"english": kept.path, "french": french})
    assert opened == {"english": kept, "french": main}
    folders = {"a": english, "b": tmp_path / "gone", "french": french}
    issues = issues_of(lambda: open_validations(main, folders))
    assert "data.validation.a" in issues["validation-tokenizer"]
    assert f"--tokenizer {french}" in issues["validation-tokenizer"]
    assert "data-not-prepared" in issues
