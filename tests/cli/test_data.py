"""`mpctl data` from the outside: its result on stdout, its errors, its exit codes."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mpctl.cli.app import run
from mpctl.render.data import data_warnings
from mpctl.train.data.manifest import FILES, open_prepared
from tests.started import started
from tests.train.data.languages import FRENCH, write_corpus

ALL = sorted([*FILES, "data.json"])


def line_below(title: str, said: str) -> str:
    """The first line of a list that is printed below a title."""
    lines = said.splitlines()
    return lines[lines.index(title) + 1]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "input.txt"
    path.write_text("".join(f"ROMEO {i}:\nBut, soft! what light {i * i}?\n" for i in range(2000)))
    return path


@pytest.fixture
def data(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert run(["data", "prepare", str(text), "--out", f"{tmp_path}/d", "--vocab-size=300"]) == 0
    capsys.readouterr()
    return tmp_path / "d"


@pytest.mark.parametrize(("texts", "lines"), [(40, 2), (60, 8), (4, 2000)])
def test_the_line_that_uses_small_texts_works_as_printed(
    texts: int, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sequence that the smaller split fills, and what to prepare for the demo's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for text in range(texts):
        words = "".join(f"line {n} of text {text}, {n * n}\n" for n in range(lines))
        (tmp_path / "texts" / f"{text}.txt").write_text(words)
    prepare = ["data", "prepare", "texts", "--vocab-size=300", "--overwrite", "--out", "d"]

    def used() -> tuple[str, bool]:
        said = capsys.readouterr().out
        assert run([*shlex.split(line_below("Use it", said))[1:], "--dry-run"]) == 0
        capsys.readouterr()
        return said, "model.seq_length=" in line_below("Use it", said)

    assert run(prepare) == 0
    said, is_shorter = used()
    assert is_shorter == (open_prepared(tmp_path / "d").validation.tokens < 257)
    assert is_shorter or texts == 4
    way = re.search(r"prepare with (--validation-fraction [0-9.]+)", said)
    assert (way is not None) == (texts == 60)
    if way:
        assert run([*prepare, *way[1].split()]) == 0
        assert not used()[1]


def issues_of(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, str]:
    """The issues by rule, from stdout's one JSON document; nothing else is there."""
    assert run(["data", *map(str, arguments), "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "mpctl.error/1"
    return {issue["rule"]: f"{issue['where']}: {issue['message']}" for issue in document["issues"]}


def test_prepare_summarises(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "d"
    arguments = ["data", "prepare", str(text), "--out", str(out), "--vocab-size", "300"]
    assert run([*arguments, "--validation-fraction", "0.25", "--seed", "7"]) == 0
    captured = capsys.readouterr()
    assert captured.err.split("\n") == ["read", "count words", "learn merges", "encode", ""]
    prepared = open_prepared(out, hashes=True)
    for split in (prepared.train, prepared.validation):
        assert f"{split.documents}" in captured.out and f"{split.tokens:,}" in captured.out
    assert all(name in captured.out for name in FILES)
    assert f"1, cut into {prepared.corpus['documents']} documents" in captured.out
    assert "300 entries, 300 of them in use" in captured.out
    assert f"--set data.path={out} --set model.vocab=300" in captured.out


def test_the_printed_command_makes_the_same_bytes(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", "show", str(data)]) == 0
    line = line_below("Made by", capsys.readouterr().out)
    command = shlex.split(line.replace(str(data), f"{tmp_path}/again"))
    assert command[0] == "mpctl"
    assert run(command[1:]) == 0
    for name in ALL:
        assert (data / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_json_is_the_manifest(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "d"
    assert run(["data", "prepare", str(text), "--out", str(out), "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest == json.loads((out / "data.json").read_text())
    assert (manifest["schema"], manifest["vocab_size"]) == ("mpctl.data/1", 4096)
    assert run(["data", "show", str(out), "--json", "--hashes"]) == 0
    shown = json.loads(capsys.readouterr().out)
    lines = shown.pop("first_lines")
    assert shown == manifest
    assert len(lines) == 5
    assert set(lines) <= set(text.read_text().splitlines())


def test_python_stdlib_is_the_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--out", f"{tmp_path}/d", "--vocab-size", "300", "--max-bytes", "300000"]
    assert run(["data", "prepare", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sources"] == ["python-stdlib"]


def test_a_given_tokenizer_decides_the_vocabulary(
    text: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--tokenizer", str(data / "tokenizer.json")]
    assert run(["data", "prepare", str(text), "--out", f"{tmp_path}/e", *given, "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["vocab_size"] == 300
    assert manifest["tokenizer_sha256"] == open_prepared(data).tokenizer_sha256


def test_more_languages(text: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The old tokenizer extended by new text, shown, made again, and used for the old text."""
    corpus, out = write_corpus(tmp_path / "fr", FRENCH), tmp_path / "e"
    extend = ["--tokenizer", str(data), "--extend-tokenizer"]
    arguments = ["data", "prepare", str(corpus), "--out", str(out), "--vocab-size", "360", *extend]
    assert run(arguments) == 0
    said = capsys.readouterr().out
    old = open_prepared(data).tokenizer_sha256
    assert f"60 added to 300 of sha256 {old[:12]}, each for " in said
    assert "extension.json" in said
    assert "360 entries, 360 of them in use" in said
    assert run(["data", "show", str(out), "--hashes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("extension") and "60 added" in line for line in lines)
    line = line_below("Made by", "\n".join(lines))
    command = shlex.split(line.replace(str(out), f"{tmp_path}/again"))
    assert "--extend-tokenizer" in command and "True" not in command
    assert run(command[1:]) == 0
    for name in (*ALL, "extension.json"):
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    capsys.readouterr()
    kept = ["data", "prepare", str(text), "--out", f"{tmp_path}/kept", "--tokenizer", str(out)]
    assert run([*kept, "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["vocab_size"] == 360
    assert manifest["extended_from"] == {"vocab_size": 300, "tokenizer_sha256": old}


def test_bad_extensions(text: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = ("--out", tmp_path / "new", "--extend-tokenizer")
    assert "extend_tokenizer" in issues_of(capsys, "prepare", text, *new)["data-setting"]
    bad = issues_of(capsys, "prepare", text, *new, "--tokenizer", data)
    assert "300 entries leave no room" in bad["vocab-too-small"]
    (tmp_path / "t.json").write_text("{}")
    bad = issues_of(capsys, "prepare", text, *new, "--tokenizer", tmp_path / "t.json", "--vocab-size", 400)
    assert "tokenizer-damaged" in bad
    assert not (tmp_path / "new").exists()


def test_show_shows_the_first_lines_and_nothing_that_steers_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("red \x1b[31m alarm [bold]not markup[/bold]\n" * 300)
    assert run(["data", "prepare", f"{tmp_path}/a.txt", "--out", f"{tmp_path}/d"]) == 0
    capsys.readouterr()
    assert run(["data", "show", f"{tmp_path}/d"]) == 0
    out = capsys.readouterr().out
    assert "red \ufffd[31m alarm [bold]not markup[/bold]" in out
    assert "\x1b" not in out


def test_bad_input(text: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = ("--out", tmp_path / "new")
    assert "corpus-missing" in issues_of(capsys, "prepare", tmp_path / "gone.txt", *new)
    bad = issues_of(capsys, "prepare", text, *new, "--vocab-size", 0)
    assert "data.vocab_size: 0" in bad["data-setting"]
    assert "vocab-too-small" in issues_of(capsys, "prepare", text, *new, "--vocab-size", 9)
    bad = issues_of(capsys, "prepare", text, *new, "--tokenizer", tmp_path / "gone.json")
    assert "tokenizer-unreadable" in bad
    (tmp_path / "blank.txt").write_text(" \n")
    assert "corpus-too-small" in issues_of(capsys, "prepare", tmp_path / "blank.txt", *new)
    assert "usage" in issues_of(capsys, "prepare", text)
    assert not (tmp_path / "new").exists()
    assert "already holds" in issues_of(capsys, "prepare", text, "--out", data)["data-occupied"]
    assert "data-not-prepared" in issues_of(capsys, "show", tmp_path)
    assert run(["data", "prepare", str(text), "--out", str(data), "--overwrite"]) == 0


def test_show_verifies(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = np.fromfile(data / "train.bin", "<u2")
    tokens[-1] ^= 1
    tokens.tofile(data / "train.bin")
    assert run(["data", "show", str(data)]) == 0  # sizes agree
    capsys.readouterr()
    assert "sha256 differs" in issues_of(capsys, "show", data, "--hashes")["data-file"]
    tokens[0] = 60_000
    tokens.tofile(data / "train.bin")
    assert "60000 is outside" in issues_of(capsys, "show", data)["token-range"]


def test_what_was_skipped_is_said_with_the_reason(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "c"
    corpus.mkdir()
    shutil.copy(text, corpus / "a.txt")
    (corpus / "b.txt.gz").write_bytes(gzip.compress(b"packed text " * 9))
    for i in range(7):
        (corpus / f"e{i}.txt").write_text("")
    (corpus / "image.png").write_bytes(b"\x89PNG\0")
    (corpus / "latin.txt").write_bytes(b"caf\xe9 " * 3)
    arguments = ["data", "prepare", str(corpus), "--out", f"{tmp_path}/d", "--vocab-size", "300"]
    assert run(arguments) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "in 3 files" in said
    assert "skipped 7 empty: e0.txt, e1.txt, e2.txt, e3.txt, e4.txt ..." in said
    assert "skipped 1 binary, or not text in this encoding: image.png" in said
    assert "3 characters could not be decoded as utf-8 and became U+FFFD, in latin.txt" in said
    binary, empty, undecodable = data_warnings(open_prepared(tmp_path / "d"))  # of a launch
    assert binary.startswith("data: skipped 1 binary") and "skipped 7 empty" in empty
    assert "data.encoding in a job" in undecodable
    assert run([*arguments, "--overwrite", "--encoding", "latin-1", "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["skipped"]["empty"]["count"] == 7
    assert manifest["skipped"]["binary"] == {"count": 1, "files": 1, "first": ["image.png"]}
    assert manifest["undecodable"]["count"] == 0
    assert run(["data", "show", f"{tmp_path}/d"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "skipped 7 empty" in said and "--encoding latin-1" in said


def test_a_launch_reads_its_corpus_the_same_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It refuses what prepare refuses, before anything is written."""
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some text " * 999)[:-4])
    launch = ["launch", "demo", "--dry-run", "--json", "--set"]
    assert run([*launch, "data.encoding=base64"]) == 2
    (issue,) = json.loads(capsys.readouterr().out)["issues"]
    assert (issue["rule"], issue["where"]) == ("corpus-encoding", "data.encoding")
    assert run([*launch, f'data.corpus=["{tmp_path}"]', "--set", "data.max_bytes=20000"]) == 2
    (issue,) = json.loads(capsys.readouterr().out)["issues"]
    assert (issue["rule"], issue["where"]) == ("corpus-unreadable", str(tmp_path / "a.txt.gz"))


def test_a_wrong_key_is_one_error_that_names_those_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "some words to learn", "id": 1}\n' * 900)
    arguments = ["data", "prepare", str(path), "--out", f"{tmp_path}/d"]
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\u2717") == 1
    assert '900 records without a string under "text"' in said
    assert "keys there: content, id" in said
    assert run([*arguments, "--text-key", "content", "--vocab-size", "300"]) == 0
    assert open_prepared(tmp_path / "d").corpus["texts"] == 900
    capsys.readouterr()
    assert "data-setting" in issues_of(capsys, *arguments[1:], "--text-key", "", "--overwrite")


@pytest.mark.parametrize(
    ("stage", "number", "code"), [("learn merges", signal.SIGINT, 130), ("count words", signal.SIGTERM, 143)]
)
def test_a_stop_ends_at_once_and_leaves_nothing(stage: str, number: int, code: int, tmp_path: Path) -> None:
    """The real command, stopped in the midst of the work that takes longest."""
    out = tmp_path / "d"
    command = [sys.executable, "-m", "mpctl", "data", "prepare", "--out", str(out)]
    pipe = subprocess.PIPE
    with started(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        for line in process.stderr:
            if line.strip() == stage:
                break
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 1
        before = time.monotonic()
        process.send_signal(number)
        assert process.wait(timeout=60) == code
        taken = time.monotonic() - before
        words = process.stderr.read()
        assert process.stdout.read() == ""
    assert taken < 5  # below a second on a quiet machine; learning merges takes longer
    assert words == f"stopped: {out} is as it was\n"
    assert not out.exists()
    assert not any(child.is_running() for child in family)
