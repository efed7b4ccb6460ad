import json
import os
import sys
import sysconfig
from pathlib import Path

import pytest

from mpctl.data.corpus import find_documents, read_documents
from mpctl.errors import InputError


def fill(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


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
            "empty.txt": "",
            ".git/config": "hidden",
            ".hidden.txt": "hidden",
            "a/__pycache__/c.py": "cached",
            "cut.dat": b"x" + "é".encode() * 5000,
        },
    )
    found = names(find_documents([tmp_path]), tmp_path)
    assert found == ["a/c", "a/z.md", "b.txt", "cut.dat", "latin.txt"]


def test_order_does_not_follow_the_file_system(tmp_path, monkeypatch):
    fill(tmp_path, {f"{i % 3}/{i}.txt": "x" * i for i in range(1, 30)})
    one = [find_documents([tmp_path], max_bytes=limit) for limit in (None, 200)]
    walk = os.walk

    def backwards(*args, **keywords):
        for folder, folders, files in walk(*args, **keywords):
            folders.reverse()
            yield folder, folders, files[::-1]

    monkeypatch.setattr(os, "walk", backwards)
    assert [find_documents([tmp_path], max_bytes=limit) for limit in (None, 200)] == one


def test_a_smaller_limit_is_a_subset_and_is_kept(tmp_path):
    fill(tmp_path, {f"{i}.txt": "x" * (10 + i) for i in range(40)})
    last: set[Path] = set()
    for limit in (60, 150, 400, 5000):
        files = find_documents([tmp_path], max_bytes=limit)
        assert sum(path.stat().st_size for path in files) <= limit
        assert last < set(files)
        assert files == sorted(files, key=lambda path: path.name)
        last = set(files)
    assert len(last) == 40
    assert find_documents([tmp_path], max_bytes=60) != sorted(tmp_path.iterdir())[:3]


def test_the_draw_is_by_name_below_the_source(tmp_path):
    files = {f"{i}.txt": "x" * 10 for i in range(20)}
    one, two = fill(tmp_path / "one", files), fill(tmp_path / "elsewhere/two", files)
    drawn = [names(find_documents([root], max_bytes=70), root) for root in (one, two)]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 7


def test_a_limit_below_the_first_file(tmp_path):
    fill(tmp_path, {"a.txt": "x" * 100})
    with pytest.raises(InputError, match="99 bytes hold no file: the first one drawn has 100"):
        find_documents([tmp_path], max_bytes=99)


def test_sources_keep_their_order_and_files_come_once(tmp_path):
    fill(tmp_path, {"b/1.txt": "1", "a/2.txt": "2"})
    found = find_documents([tmp_path / "b" / "1.txt", str(tmp_path / "a"), tmp_path])
    assert names(found, tmp_path) == ["b/1.txt", "a/2.txt"]


def test_all_bad_sources_are_named(tmp_path):
    fill(tmp_path, {"image.png": b"\x89PNG\0", "good.txt": "x"})
    sources = [tmp_path / name for name in ("gone", "good.txt", "image.png", "gone too")]
    with pytest.raises(InputError) as caught:
        find_documents(sources)
    assert [issue.where for issue in caught.value.issues] == [str(sources[i]) for i in (0, 2, 3)]
    rules = [issue.rule for issue in caught.value.issues]
    assert rules == ["corpus-missing", "corpus-binary", "corpus-missing"]
    assert all(issue.hint for issue in caught.value.issues)


def test_empty_corpus(tmp_path):
    for sources in ([tmp_path], []):
        with pytest.raises(InputError, match="no text found"):
            find_documents(sources)


def test_python_stdlib_is_its_own_code():
    found = names(find_documents(["python-stdlib"]), Path(sysconfig.get_path("stdlib")))
    assert {"argparse.py", "json/decoder.py", "asyncio/base_events.py"} <= set(found)
    assert all(name.endswith(".py") for name in found)
    folders = {part for name in found for part in name.split("/")[:-1]}
    assert not folders & {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def test_jsonl_is_a_document_a_line(tmp_path):
    texts = ["one\ntwo", "  ", "\ud800 half", "é\u2028x"]
    lines = (
        "\n".join(json.dumps({"text": text, "id": 1}) for text in texts)
        + '\n\r\n{"text":\r"cr"}\r\n'
    )
    fill(tmp_path, {"a.jsonl": lines, "b.txt": b"\xef\xbb\xbfbom\xff"})
    found = list(read_documents(find_documents([tmp_path])))
    assert found == ["one\ntwo", "? half", "é\u2028x", "cr", "bom\ufffd"]


def test_all_bad_lines_are_named_after_the_good_ones(tmp_path):
    deep = "[" * (sys.getrecursionlimit() * 50)
    fill(tmp_path, {"a.jsonl": '{"text": "fine"}\n{"text": 3}\n[]\n', "b.jsonl": f"{deep}\nnope\n"})
    good = []
    with pytest.raises(InputError) as caught:
        good.extend(read_documents([*find_documents([tmp_path]), tmp_path / "gone.txt"]))
    wheres = [issue.where.removeprefix(f"{tmp_path}/") for issue in caught.value.issues]
    assert wheres == ["a.jsonl:2", "a.jsonl:3", "b.jsonl:1", "b.jsonl:2", "gone.txt"]
    (bad,) = [issue for issue in caught.value.issues if issue.rule == "corpus-unreadable"]
    assert "No such file" in bad.message


def test_a_file_of_bad_lines_does_not_fill_the_memory(tmp_path):
    fill(tmp_path, {"a.jsonl": "nope\n" * 1000})
    with pytest.raises(InputError) as caught:
        list(read_documents([tmp_path / "a.jsonl"]))
    assert len(caught.value.issues) == 20
