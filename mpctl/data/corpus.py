"""Texts of a corpus: text files, folders, .jsonl files, or Python's own standard library.

The order of files is a function of their names below each source, never of the file system. A
byte limit keeps a prefix of the files sorted by the hash of that name, so that a smaller limit
yields a subset of a larger one: of files a, b, c of 4 bytes hashed in the order c, a, b, a limit
of 8 keeps {a, c}. A file holds one text, a .jsonl file one a line (key `text`): what
documents.py cuts into documents, or takes as they are.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpctl.errors import InputError, Issue

PYTHON_STDLIB = "python-stdlib"
STDLIB_PACKAGES = {"site-packages", "dist-packages"}
STDLIB_TESTS = {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"}
STDLIB_TABLES = {"encodings", "pydoc_data"}
STDLIB_SKIPS = frozenset(STDLIB_PACKAGES | STDLIB_TESTS | STDLIB_TABLES)
TEXT_SUFFIXES = frozenset(
    (".txt", ".text", ".md", ".rst", ".tex", ".py", ".html", ".xml", ".json", ".jsonl", ".csv")
)
MOST_ISSUES = 20
SNIFF_BYTES = 8192


@dataclass(frozen=True, slots=True)
class _Found:
    name: str  # below its source, with forward slashes
    path: Path
    size: int

    @property
    def hash(self) -> bytes:
        return hashlib.blake2b(os.fsencode(self.name), digest_size=16).digest()


def find_documents(sources: Sequence[str | Path], *, max_bytes: int | None = None) -> list[Path]:
    """Text files of the sources, in their order, by name within each; every file once.

    A source is a file, a folder (hidden files, __pycache__ and binary files are passed over) or
    the word `python-stdlib` (write `./python-stdlib` for a folder of that name). InputError
    names all missing and unreadable sources, or says that nothing was found.
    """
    issues: list[Issue] = []
    by_path: dict[Path, _Found] = {}
    for source in sources:
        try:
            files = sorted(_expand(source, issues), key=lambda file: file.name)
        except OSError as error:
            issues.append(_unreadable(error))
            continue
        for file in files:
            by_path.setdefault(file.path.resolve(), file)
    if issues:
        raise InputError(issues[:MOST_ISSUES])
    if not by_path:
        names = ", ".join(map(str, sources)) or "no source"
        hint = f"name text files, folders that hold some, or {PYTHON_STDLIB}"
        raise InputError.of("corpus-empty", "data.sources", f"{names}: no text found", hint)
    kept = list(by_path.values())
    return [file.path for file in (kept if max_bytes is None else _prefix(kept, max_bytes))]


def _prefix(files: list[_Found], max_bytes: int) -> list[_Found]:
    """The files, in the order given, that precede the limit in the order of their hashes."""
    total, kept = 0, set()
    for i in sorted(range(len(files)), key=lambda i: (files[i].hash, i)):
        total += files[i].size
        if total > max_bytes:
            break
        kept.add(i)
    if not kept:
        message = f"{max_bytes} bytes hold no file: the first one drawn has {total}"
        hint = f"allow at least {total}, better a few times that"
        raise InputError.of("corpus-max-bytes", "data.max_bytes", message, hint)
    return [file for i, file in enumerate(files) if i in kept]


def _expand(source: str | Path, issues: list[Issue]) -> Iterator[_Found]:
    path, before = Path(source), len(issues)
    if source == PYTHON_STDLIB:
        path = Path(sysconfig.get_path("stdlib"))
        yield from (f for f in _walk(path, STDLIB_SKIPS, issues) if f.path.suffix == ".py")
    elif path.is_dir():
        yield from _walk(path, frozenset(), issues)
    elif not path.is_file():
        hint = f"name a text file, a folder, or {PYTHON_STDLIB}"
        issues.append(Issue("corpus-missing", str(source), "no such file or folder", hint))
    elif _is_text(path, issues):
        yield _Found(path.name, path, path.stat().st_size)
    elif len(issues) == before:
        hint = "unpack or convert it to UTF-8 text first"
        issues.append(Issue("corpus-binary", str(source), "empty, or not a text file", hint))


def _walk(root: Path, skips: frozenset[str], issues: list[Issue]) -> Iterator[_Found]:
    for folder, folders, files in os.walk(root, onerror=lambda e: issues.append(_unreadable(e))):
        folders[:] = [f for f in folders if f[0] != "." and f not in skips | {"__pycache__"}]
        for path in (Path(folder, file) for file in files if file[0] != "."):
            if path.is_file() and _is_text(path, issues):
                yield _Found(path.relative_to(root).as_posix(), path, path.stat().st_size)


def _is_text(path: Path, issues: list[Issue]) -> bool:
    """Not empty, no NUL at the start, and named as text or decodable as UTF-8."""
    try:
        with path.open("rb") as stream:
            head = stream.read(SNIFF_BYTES)
    except OSError as error:
        issues.append(_unreadable(error))
        return False
    if not head or b"\0" in head:
        return False
    whole = len(head) < SNIFF_BYTES  # otherwise its end may cut a character in two
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=whole)
    except UnicodeDecodeError:
        return path.suffix.lower() in TEXT_SUFFIXES
    return True


def _unreadable(error: OSError) -> Issue:
    message = f"not readable: {error.strerror}"
    return Issue("corpus-unreadable", str(error.filename), message, "check its permissions")


def read_documents(paths: Iterable[Path]) -> Iterator[str]:
    """The documents in order, blank ones left out; undecodable bytes become U+FFFD.

    Good documents come first: InputError at the end names the files and lines that are bad.
    """
    issues: list[Issue] = []
    for path in paths:
        try:
            yield from _read(path, issues)
        except OSError as error:
            issues.append(_unreadable(error))
        if len(issues) >= MOST_ISSUES:
            break
    if issues:
        raise InputError(issues)


def _read(path: Path, issues: list[Issue]) -> Iterator[str]:
    if path.suffix.lower() == ".jsonl":
        yield from _read_lines(path, issues)
        return
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if text.strip():
        yield text


def _read_lines(path: Path, issues: list[Issue]) -> Iterator[str]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if len(issues) >= MOST_ISSUES:
                return
            text = _text_of(line) if line.strip() else ""
            if text is None:
                hint = 'write one {"text": "..."} a line'
                message = 'no JSON object with a string under "text"'
                issues.append(Issue("corpus-jsonl", f"{path}:{number}", message, hint))
            elif text.strip():
                yield text


def _text_of(line: str) -> str | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    text = record.get("text") if isinstance(record, dict) else None
    # JSON can spell half a surrogate pair, which no UTF-8 holds.
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else None
