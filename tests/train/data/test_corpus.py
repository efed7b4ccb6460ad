import gzip
import json
import os
import sys
import sysconfig
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from mpctl.core.errors import InputError
from mpctl.train.data.corpus import find_files
from mpctl.train.data.texts import FIRST_NAMES, Findings, Reading, read_texts
from tests.train.data.reading import find_paths, read_all


def fill(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def packed(kind: str, content: bytes) -> bytes:
    return gzip.compress(content) if kind == "gz" else zstandard.compress(content)


def names(paths: list[Path], root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in paths]


def test_a_folder_in_order_of_names_without_what_is_no_text(tmp_path):
    fill(
        tmp_path,
        {
            "b.txt": "b",
            "a/z.md": "z",
            "a/c": "no suffix, but text",
            "latin.txt": "caf\xe9".encode("latin-1"),
            "latin.dat": "caf\xe9".encode("latin-1"),
            "image.png": b"\x89PNG\0\0",
            "named.txt": b"text with a \0 in it",
            **{f"empty{i}.txt": "" for i in range(9)},
            ".git/config": "hidden",
            ".hidden.txt": "hidden",
            "a/__pycache__/c.py": "cached",
            "cut.dat": b"x" + "é".encode() * 5000,
        },
    )
    (tmp_path / "broken.txt").symlink_to("nowhere")
    findings = Findings()
    found = names(find_paths([tmp_path], findings=findings), tmp_path)
    assert found == ["a/c", "a/z.md", "b.txt", "cut.dat", "latin.txt"]
    empty = findings.skipped.pop("empty")
    first = [f"empty{i}.txt" for i in range(FIRST_NAMES)]
    assert empty.as_dict() == {"count": 9, "files": 9, "first": first}
    assert {reason: tally.first for reason, tally in findings.skipped.items()} == {
        "binary": ["image.png", "latin.dat", "named.txt"],
        "hidden": [".git/", ".hidden.txt", "a/__pycache__/"],
        "special": ["broken.txt"],
    }


def test_order_does_not_follow_the_file_system(tmp_path, monkeypatch):
    fill(tmp_path, {f"{i % 3}/{i}.txt": "x" * i for i in range(1, 30)})
    one = [find_paths([tmp_path], max_bytes=limit) for limit in (None, 200)]
    walk = os.walk

    def backwards(*args, **keywords):
        for folder, folders, files in walk(*args, **keywords):
            folders.reverse()
            yield folder, folders, files[::-1]

    monkeypatch.setattr(os, "walk", backwards)
    assert [find_paths([tmp_path], max_bytes=limit) for limit in (None, 200)] == one


def test_a_smaller_limit_is_a_subset_and_is_not_exceeded(tmp_path):
    fill(tmp_path, {f"{i}.txt": "x" * (10 + i) for i in range(40)})
    last: set[Path] = set()
    for limit in (60, 150, 400, 5000):
        files = find_paths([tmp_path], max_bytes=limit)
        assert sum(path.stat().st_size for path in files) <= limit
        assert last < set(files)
        assert files == sorted(files, key=lambda path: path.name)
        last = set(files)
    assert len(last) == 40
    assert find_paths([tmp_path], max_bytes=60) != sorted(tmp_path.iterdir())[:3]


def test_the_draw_is_by_name_below_the_source(tmp_path):
    files = {f"{i}.txt": "x" * 10 for i in range(20)}
    one, two = fill(tmp_path / "one", files), fill(tmp_path / "elsewhere/two", files)
    drawn = [names(find_paths([root], max_bytes=70), root) for root in (one, two)]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 7
    with pytest.raises(InputError, match="9 bytes hold no file: the first one drawn has 10"):
        find_paths([one], max_bytes=9)


def test_sources_keep_their_order_and_files_come_once(tmp_path):
    fill(tmp_path, {"b/1.txt": "1", "a/2.txt": "2"})
    found = find_paths([tmp_path / "b" / "1.txt", str(tmp_path / "a"), tmp_path])
    assert names(found, tmp_path) == ["b/1.txt", "a/2.txt"]


def test_all_bad_sources_are_named(tmp_path):
    fill(tmp_path, {"image.png": b"\x89PNG\0", "good.txt": "x", "empty.txt": ""})
    names = ("gone", "good.txt", "image.png", "gone too", "empty.txt")
    sources = [tmp_path / name for name in names]
    with pytest.raises(InputError) as caught:
        find_paths(sources)
    assert [issue.where for issue in caught.value.issues] == [str(sources[i]) for i in (0, 2, 3, 4)]
    rules = [issue.rule for issue in caught.value.issues]
    assert rules == ["corpus-missing", "corpus-binary", "corpus-missing", "corpus-empty"]
    assert all(issue.hint for issue in caught.value.issues)


def test_empty_corpus(tmp_path):
    for sources in ([tmp_path], []):
        with pytest.raises(InputError, match="no text found"):
            find_paths(sources)


def test_python_stdlib_is_its_own_code():
    found = names(find_paths(["python-stdlib"]), Path(sysconfig.get_path("stdlib")))
    assert {"argparse.py", "json/decoder.py", "asyncio/base_events.py"} <= set(found)
    assert all(name.endswith(".py") for name in found)
    folders = {part for name in found for part in name.split("/")[:-1]}
    assert not folders & {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def test_jsonl_is_a_document_a_line(tmp_path):
    texts = ["one\ntwo", "  ", "\ud800 half", "é\u2028x"]
    lines = "\n".join(json.dumps({"text": text, "id": 1}) for text in texts) + '\n\r\n{"text":\r"cr"}\r\n'
    fill(tmp_path, {"a.jsonl": lines, "b.txt": b"\xef\xbb\xbfbom\xff"})
    findings = Findings()
    found = read_all(find_paths([tmp_path]), findings)
    assert found == ["one\ntwo", "? half", "é\u2028x", "cr", "bom\ufffd"]
    assert findings.undecodable.as_dict() == {"count": 1, "files": 1, "first": ["b.txt"]}
    assert findings.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert findings.issues == []


def test_equal_faults_are_one_issue_each_with_its_count(tmp_path):
    deep = "[" * (sys.getrecursionlimit() * 50)
    bad = '{"text": "fine"}\n' + '{"body": "x", "id": 1}\n' * 30 + "nope\n" * 40
    fill(tmp_path, {"a.jsonl": bad, "b.jsonl": f'{deep}\n{{"text": 3}}\n'})
    findings = Findings()
    paths = [*find_paths([tmp_path]), tmp_path / "gone.txt"]
    assert read_all(paths, findings) == ["fine"]
    unreadable, malformed, lacking = findings.issues
    assert unreadable.where == str(tmp_path / "gone.txt") and "No such file" in unreadable.message
    assert "41 lines without a JSON object" in malformed.message
    assert f"{tmp_path}/a.jsonl:32" in malformed.message
    assert '31 records without a string under "text"' in lacking.message
    assert lacking.message.endswith("; keys there: body, id, text")
    assert "--text-key" in lacking.hint
    assert read_all(paths[:1], text_key="body") == ["x"] * 30


@pytest.mark.parametrize("pack", ["gz", "zst"])
def test_packed_files_are_read_as_what_they_hold(tmp_path, pack):
    line = json.dumps({"text": "a line"}) + "\n"
    fill(
        tmp_path,
        {
            f"a.txt.{pack}": packed(pack, b"first ") + packed(pack, b"second"),  # two members
            f"b.JSONL.{pack}": packed(pack, line.encode() * 3),
            f"c.{pack}": packed(pack, b"text without a suffix"),
            f"d.tar.{pack}": packed(pack, b"name\0\0\0"),
            f"e.txt.{pack}": packed(pack, b""),
        },
    )
    findings = Findings()
    paths = find_paths([tmp_path], findings=findings)
    assert read_all(paths, findings) == ["first second", *["a line"] * 3, "text without a suffix"]
    assert findings.skipped["binary"].first == [f"d.tar.{pack}"]
    assert findings.skipped["empty"].first == [f"e.txt.{pack}"]
    assert findings.bytes == 12 + 3 * len(line) + 21


@pytest.mark.parametrize("pack", ["gz", "zst"])
def test_packed_files_that_are_cut_off_or_damaged(tmp_path, pack):
    whole = packed(pack, os.urandom(100_000).hex().encode())
    for content in (whole[:-9], whole[: len(whole) // 2], whole[:3], whole[:900] + b"x" * 900):
        (tmp_path / f"a.txt.{pack}").write_bytes(content)
        findings = Findings()
        try:
            read_all(find_paths([tmp_path]), findings)
        except InputError as error:
            issues = error.issues
        else:
            issues = findings.issues
        assert [issue.rule for issue in issues] == ["corpus-unreadable"]
        assert issues[0].where.endswith(f"a.txt.{pack}")


@pytest.mark.parametrize("pack", [pytest.param("gz", marks=pytest.mark.slow), "zst"])
def test_a_small_file_that_unpacks_to_much_needs_little_memory(tmp_path, pack):
    size = 100_000_000
    (tmp_path / f"bomb.txt.{pack}").write_bytes(packed(pack, b"a" * size))
    (file,) = find_files([tmp_path])
    assert file.size < size / 500
    tracemalloc.start()
    try:
        chunks = (c for text in read_texts(file.path, Reading(), Findings(), int) for c in text)
        assert sum(map(len, chunks)) == size
        assert tracemalloc.get_traced_memory()[1] < 40_000_000
    finally:
        tracemalloc.stop()
    with pytest.raises(InputError, match="1000 bytes hold no file"):
        find_files([tmp_path], max_bytes=1000)


def test_a_limit_counts_what_packed_files_hold(tmp_path):
    files = {f"{i}.txt": b"x" * 100 for i in range(8)}
    fill(tmp_path / "plain", files)
    fill(tmp_path / "packed", files)
    for path in list((tmp_path / "packed").iterdir()):
        path.write_bytes(packed("gz", path.read_bytes()))
        path.rename(path.with_name(f"{path.name}.gz"))
    findings = Findings()
    assert len(find_paths([tmp_path / "packed"], max_bytes=350, findings=findings)) == 3
    assert findings.skipped["beyond-max-bytes"].count == 5
    assert len(find_paths([tmp_path / "plain"], max_bytes=350)) == 3


def test_parquet_is_a_document_a_row(tmp_path):
    table = pa.table({"text": [f"row {i}" for i in range(600)] + [None, " "], "id": range(602)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=250)
    findings = Findings()
    paths = find_paths([tmp_path])
    assert read_all(paths, findings) == [f"row {i}" for i in range(600)]
    assert findings.issues == []
    read_all(paths, wrong := Findings("body"), text_key="body")
    (issue,) = wrong.issues
    assert '602 records without a string under "body"' in issue.message
    assert issue.message.endswith("keys there: text, id")
    read_all(paths, wrong := Findings("id"), text_key="id")
    assert "is int64, not strings" in wrong.issues[0].message
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing of it PAR1")
    read_all(paths, wrong := Findings())
    assert [issue.rule for issue in wrong.issues] == ["corpus-unreadable"]


def test_parquet_without_its_extra_offers_the_install_command(tmp_path, monkeypatch):
    fill(tmp_path, {"a.parquet": b"PAR1", "b.parquet": b"PAR1"})
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError) as caught:
        find_files([tmp_path])
    (issue,) = caught.value.issues  # once, however many files
    assert issue.rule == "parquet-extra" and "pip install 'mpctl[parquet]'" in issue.hint


def test_other_encodings(tmp_path):
    fill(
        tmp_path,
        {
            "a.txt": "café".encode("latin-1"),
            "b.dat": "déjà".encode("latin-1"),
            "c.jsonl": json.dumps({"text": "né"}, ensure_ascii=False).encode("latin-1"),
        },
    )
    paths = find_paths([tmp_path], encoding="latin-1")
    assert read_all(paths, encoding="latin-1") == ["café", "déjà", "né"]
    fill(tmp_path / "wide", {"a.txt": "wide é".encode("utf-16")})
    paths = find_paths([tmp_path / "wide"], encoding="utf-16")
    assert read_all(paths, encoding="utf-16") == ["wide é"]
    for name in ("base64", "no such", ""):
        with pytest.raises(InputError, match="no encoding of text"):
            find_paths([tmp_path], encoding=name)


def test_a_line_that_never_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("mpctl.train.data.texts.LONGEST_RECORD", 1000)
    fill(tmp_path, {"a.jsonl": '{"text": "fine"}\n' + "x" * 5000})
    findings = Findings()
    assert read_all(find_paths([tmp_path]), findings) == ["fine"]
    assert findings.issues[0].where.endswith("a.jsonl:2")
    assert "more than 1,000 characters" in findings.issues[0].message
