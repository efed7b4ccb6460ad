"""Files of a corpus: named ones, folders, or Python's standard library.

The order of files is a function of their names below each source, never of the file system. A
byte limit keeps a prefix of the files sorted by the hash of that name, so that a smaller limit
yields a subset of a larger one: of files a, b, c of 4 bytes hashed in the order c, a, b, a limit
of 8 keeps {a, c}. Compressed files count with their unpacked size. Files in a folder that are not
text are skipped and noted with the reason; texts.py reads the rest.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpctl.core.errors import InputError, Issue
from mpctl.spec.paths import PYTHON_STDLIB
from mpctl.train.data.streams import READ_ERRORS, codec_name, content_size, content_suffix, format_of, open_bytes
from mpctl.train.data.texts import Findings, parquet_size, require_parquet

STDLIB_PACKAGES = {"site-packages", "dist-packages"}
STDLIB_TESTS = {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"}
STDLIB_TABLES = {"encodings", "pydoc_data"}
STDLIB_SKIPS = frozenset(STDLIB_PACKAGES | STDLIB_TESTS | STDLIB_TABLES)
TEXT_SUFFIXES = frozenset((".txt", ".text", ".md", ".rst", ".tex", ".py", ".html", ".xml", ".json", ".jsonl", ".csv"))
SNIFF_BYTES = 8192


@dataclass(frozen=True, slots=True)
class File:
    """A file of the corpus. name: below its source, with forward slashes; size: as stored."""

    name: str
    path: Path
    size: int

    @property
    def hash(self) -> bytes:
        """16 bytes that order files when a byte limit keeps only some; of the name alone."""
        return hashlib.blake2b(os.fsencode(self.name), digest_size=16).digest()


def find_files(
    sources: Sequence[str | Path],
    *,
    max_bytes: int | None = None,
    encoding: str = "utf-8",
    findings: Findings | None = None,
) -> list[File]:
    """The files of the sources that hold text, in their order, by name within each; every file
    once.

    A source is a file, a folder or the word `python-stdlib` (write `./python-stdlib` for a folder
    of that name). Other files in folders are noted in `findings`. InputError names all missing and
    unreadable sources, or says that nothing was found.
    """
    check_encoding(encoding)
    findings = findings or Findings()
    by_path: dict[Path, File] = {}
    for source in sources:
        try:
            files = sorted(_expand(source, encoding, findings), key=lambda file: file.name)
        except OSError as error:
            findings.unreadable(Path(source), error)
            continue
        for file in files:
            by_path.setdefault(file.path.resolve(), file)
    if findings.issues:
        raise InputError(findings.issues)
    if not by_path:
        names = ", ".join(map(str, sources)) or "no source"
        hint = f"name text files, folders that hold some, or {PYTHON_STDLIB}"
        raise InputError.of("corpus-empty", "data.sources", f"{names}: no text found", hint)
    files = list(by_path.values())
    return files if max_bytes is None else _prefix(files, max_bytes, findings)


def check_encoding(encoding: str) -> None:
    """InputError unless Python knows the encoding as one of text."""
    try:
        b"a".decode(encoding, "replace")
    except (LookupError, ValueError):
        message = f"{encoding!r} is no encoding of text"
        hint = "use utf-8, latin-1, utf-16 or another name that Python knows"
        raise InputError.of("corpus-encoding", "data.encoding", message, hint) from None


def _prefix(files: list[File], max_bytes: int, findings: Findings) -> list[File]:
    """The files within the limit in the order of their hashes, returned in the original order."""
    total, chosen = 0, set()
    for i in sorted(range(len(files)), key=lambda i: (files[i].hash, i)):
        total += _content_size(files[i].path, max_bytes - total)
        if total > max_bytes:
            break
        chosen.add(i)
    if not chosen:
        message = f"{max_bytes} bytes hold no file: the first one drawn has {total} or more"
        hint = f"allow at least {total}, better a few times that"
        raise InputError.of("corpus-max-bytes", "data.max_bytes", message, hint)
    for i, file in enumerate(files):
        if i not in chosen:
            findings.skip("beyond-max-bytes", file.name)
    return [file for i, file in enumerate(files) if i in chosen]


def _content_size(path: Path, limit: int) -> int:
    try:
        if format_of(path) == "parquet":
            return parquet_size(path)
        return content_size(path, limit=limit)
    except (*READ_ERRORS, ValueError) as error:
        broken = Findings()
        broken.unreadable(path, error)
        raise InputError(broken.issues) from None


def _expand(source: str | Path, encoding: str, findings: Findings) -> Iterator[File]:
    path = Path(source)
    if source == PYTHON_STDLIB:
        yield from _standard_library(findings)
    elif path.is_dir():
        yield from _walk(path, frozenset(), encoding, findings)
    elif not path.is_file():
        hint = f"name a text file, a folder, or {PYTHON_STDLIB}"
        message = "no such file or folder"
        findings.others.append(Issue("corpus-missing", str(source), message, hint))
    elif (reason := _no_text(path, encoding, findings)) is None:
        yield File(path.name, path, path.stat().st_size)
    elif reason == "empty":
        issue = Issue("corpus-empty", str(source), "the file is empty", "name files that hold text")
        findings.others.append(issue)
    elif reason != "unreadable":
        message = f"not a text file in {encoding}"
        hint = "convert it to text first, or name its --encoding"
        findings.others.append(Issue("corpus-binary", str(source), message, hint))


def _standard_library(findings: Findings) -> Iterator[File]:
    """The .py files of Python's standard library; other files are passed over without a note."""
    quiet = Findings(others=findings.others)
    root = Path(sysconfig.get_path("stdlib"))
    files = _walk(root, STDLIB_SKIPS, "utf-8", quiet)
    yield from (file for file in files if file.path.suffix == ".py")


def _walk(root: Path, skips: frozenset[str], encoding: str, findings: Findings) -> Iterator[File]:
    def unreadable(error: OSError) -> None:
        findings.unreadable(Path(error.filename), error)

    for folder, folders, files in os.walk(root, onerror=unreadable):
        visible = [f for f in folders if f[0] != "." and f not in skips | {"__pycache__"}]
        for name in sorted({*folders} - {*visible} - skips):
            findings.skip("hidden", f"{Path(folder, name).relative_to(root).as_posix()}/")
        folders[:] = visible
        for path in (Path(folder, file) for file in sorted(files)):
            name = path.relative_to(root).as_posix()
            if path.name[0] == ".":
                findings.skip("hidden", name)
            elif not path.is_file():
                findings.skip("special", name)
            elif (reason := _no_text(path, encoding, findings)) is None:
                yield File(name, path, path.stat().st_size)
            elif reason != "unreadable":
                findings.skip(reason, name)


def _no_text(path: Path, encoding: str, findings: Findings) -> str | None:
    """Return the reason why a file is not text; None for text: not empty, without NUL at the start,
    and named as text or decodable."""
    try:
        if path.stat().st_size == 0:
            return "empty"
        if format_of(path) == "parquet":
            require_parquet(path)
            return None
        with open_bytes(path) as stream:
            head = stream.read(SNIFF_BYTES)
    except InputError as error:  # pyarrow is missing: reported once
        known = {issue.rule for issue in findings.others}
        findings.others += [issue for issue in error.issues if issue.rule not in known]
        return "unreadable"
    except READ_ERRORS as error:
        findings.unreadable(path, error)
        return "unreadable"
    is_all = len(head) < SNIFF_BYTES  # otherwise its end may cut a character in two
    try:
        text = codecs.getincrementaldecoder(codec_name(encoding))().decode(head, final=is_all)
    except UnicodeError:
        is_named = content_suffix(path) in TEXT_SUFFIXES and b"\0" not in head
        return None if is_named else "binary"
    if not head:
        return "empty"
    return "binary" if "\0" in text else None
