"""The manifest of prepared data, data.json: what lies in the directory and how it came about.

It is written last and whole, so a directory holds prepared data if and only if it holds a
data.json that agrees with the files beside it: sizes always, sha256 on demand. Data of an extended
tokenizer hold extension.json too, and the manifest says from what it was `extended_from`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from mpctl.data.extend import EXTENSION, TokenizerExtension, read_extension
from mpctl.data.indexed import IndexedDataset
from mpctl.errors import InputError, Issue

SCHEMA = "mpctl.data/1"
MANIFEST = "data.json"
SPLITS = ("train", "validation")
TOKENIZER = "tokenizer.json"
FILES = ("train.bin", "train.idx", "validation.bin", "validation.idx", TOKENIZER)
CORPUS = ("files", "texts", "documents", "bytes")
LONGEST_MANIFEST = 2**20
NONE: Mapping[str, Any] = {"count": 0, "files": 0, "first": ()}
AGAIN = "run `mpctl data prepare` with --overwrite"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and SHA-256 of a file of prepared data."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """The record of a file as it lies on the disk."""
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return cls(path.stat().st_size, digest)


@dataclass(frozen=True, slots=True)
class Split:
    """One of `train` and `validation`: sizes in documents and tokens, end-of-text included."""

    prefix: Path
    documents: int
    tokens: int

    def open(self) -> IndexedDataset:
        """The split's tokens, memory-mapped; InputError where its files are damaged."""
        return IndexedDataset(self.prefix)


class SplitCounts(TypedDict):
    """Sizes of a split; tokens with the end-of-text of each document."""

    documents: int
    tokens: int


class FileEntry(TypedDict):
    """Size of a file and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


class _Origin(TypedDict, total=False):
    """What an extended tokenizer was made from."""

    extended_from: Mapping[str, object]


class DataManifest(_Origin):
    """Schema mpctl.data/1: what prepared data were made of and what they hold."""

    schema: str
    sources: list[str]
    settings: dict[str, object]
    corpus: dict[str, int]
    skipped: dict[str, Mapping[str, object]]
    undecodable: dict[str, object]
    splits: dict[str, SplitCounts]
    vocab_size: int
    tokenizer_vocab_size: int
    end_of_text_id: int
    dtype: str
    tokenizer_sha256: str
    files: dict[str, FileEntry]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A directory of prepared data. `settings` are the arguments that made it.

    vocab_size is the size the model gets; tokenizer_vocab_size, what the tokenizer uses of it.
    skipped: by reason, how many files, folders or texts were passed over and the `first` names;
    undecodable: characters that could not be decoded, likewise. extension: what the ids stand for
    that were added to an older tokenizer.
    """

    path: Path
    sources: tuple[str, ...]
    settings: Mapping[str, Any]
    corpus: Mapping[str, int]  # files, texts in them, documents they were cut into, bytes
    train: Split
    validation: Split
    vocab_size: int
    tokenizer_vocab_size: int
    end_of_text_id: int
    dtype: str
    files: Mapping[str, FileRecord]
    skipped: Mapping[str, Mapping[str, Any]]
    undecodable: Mapping[str, Any]
    extension: TokenizerExtension | None = None

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer.json that the data were encoded with."""
        return self.path / TOKENIZER

    @property
    def tokenizer_sha256(self) -> str:
        """The SHA-256 of that file, in hexadecimal."""
        return self.files[TOKENIZER].sha256

    def as_dict(self) -> DataManifest:
        """The manifest; it holds no paths but those of the settings, and no dates."""
        splits = {"train": self.train, "validation": self.validation}
        origin: _Origin = {}
        if self.extension is not None:
            origin["extended_from"] = _source(self.extension)
        return {
            "schema": SCHEMA,
            "sources": list(self.sources),
            "settings": dict(self.settings),
            "corpus": dict(self.corpus),
            "skipped": dict(self.skipped),
            "undecodable": dict(self.undecodable),
            "splits": {
                name: {"documents": split.documents, "tokens": split.tokens}
                for name, split in splits.items()
            },
            "vocab_size": self.vocab_size,
            "tokenizer_vocab_size": self.tokenizer_vocab_size,
            "end_of_text_id": self.end_of_text_id,
            "dtype": self.dtype,
            "tokenizer_sha256": self.tokenizer_sha256,
            **origin,
            "files": {
                name: {"bytes": file.bytes, "sha256": file.sha256}
                for name, file in self.files.items()
            },
        }


def open_prepared(out: Path, *, hashes: bool = False) -> Prepared:
    """The prepared data in `out`; InputError names every file that differs from the manifest.

    Sizes, indices and counts are always checked; sha256 (about 1 s a GB) with hashes=True.
    """
    path = out / MANIFEST
    if not path.is_file():
        hint = "prepare it first: `mpctl data prepare`"
        raise InputError.of("data-not-prepared", str(out), f"holds no {MANIFEST}", hint)
    try:
        prepared = _parse(out, path)
    except (KeyError, TypeError, ValueError, AttributeError, OSError, RecursionError) as error:
        message = f"damaged manifest: {type(error).__name__}: {error}"
        raise InputError.of("data-manifest", str(path), message, AGAIN) from None
    issues = [issue for name in prepared.files for issue in _differences(prepared, name, hashes)]
    if not issues:
        issues = [issue for name in SPLITS for issue in _split_differences(prepared, name)]
    if issues:
        raise InputError(issues)
    return _with_extension(prepared) if EXTENSION in prepared.files else prepared


def open_validations(main: Prepared, folders: Mapping[str, Path]) -> dict[str, Prepared]:
    """Other prepared data to validate on, by name; InputError unless all use main's tokenizer."""
    opened: dict[str, Prepared] = {}
    issues: list[Issue] = []
    for name, folder in folders.items():
        try:
            opened[name] = open_prepared(folder)
        except InputError as error:
            issues += error.issues
            continue
        if opened[name].tokenizer_sha256 != main.tokenizer_sha256:
            message = f"the tokenizer of {folder} is not that of {main.path}: ids differ in meaning"
            hint = f"prepare its text with --tokenizer {main.tokenizer_path}"
            issues.append(Issue("validation-tokenizer", f"data.validation.{name}", message, hint))
    if issues:
        raise InputError(issues)
    return opened


def _source(extension: TokenizerExtension) -> dict[str, Any]:
    return {
        "vocab_size": extension.old_vocab_size,
        "tokenizer_sha256": extension.old_tokenizer_sha256,
    }


def _with_extension(prepared: Prepared) -> Prepared:
    path = prepared.path / EXTENSION
    extension = read_extension(path)
    said = extension.tokenizer_sha256, extension.vocab_size
    if said != (prepared.tokenizer_sha256, prepared.tokenizer_vocab_size):
        message = f"is of another tokenizer, of {extension.vocab_size} entries, than {TOKENIZER}"
        raise InputError.of("data-extension", str(path), message, AGAIN)
    return replace(prepared, extension=extension)


def _parse(out: Path, path: Path) -> Prepared:
    if path.stat().st_size > LONGEST_MANIFEST:
        raise ValueError(f"longer than {LONGEST_MANIFEST} bytes")
    read = json.loads(path.read_text(encoding="utf-8"))
    if read["schema"] != SCHEMA:
        raise ValueError(f"schema {read['schema']!r}, expected {SCHEMA!r}")
    train, validation = (
        Split(out / name, _count(read["splits"][name], "documents"), _tokens(read, name))
        for name in SPLITS
    )
    prepared = Prepared(
        path=out,
        sources=tuple(str(source) for source in read["sources"]),
        settings=dict(read["settings"]),
        corpus={name: _count(read["corpus"], name) for name in CORPUS},
        train=train,
        validation=validation,
        vocab_size=_count(read, "vocab_size"),
        tokenizer_vocab_size=_count(read, "tokenizer_vocab_size"),
        end_of_text_id=_count(read, "end_of_text_id"),
        dtype=str(read["dtype"]),
        files={name: _file(read["files"][name]) for name in _names(read["files"])},
        # Manifests of earlier versions do not say these.
        skipped={str(why): _tally(tally) for why, tally in read.get("skipped", {}).items()},
        undecodable=_tally(read.get("undecodable", NONE)),
    )
    if prepared.tokenizer_sha256 != read["tokenizer_sha256"]:
        raise ValueError(f"two different hashes for {TOKENIZER}")
    return prepared


def _names(files: Any) -> tuple[str, ...]:
    return (*FILES, EXTENSION) if EXTENSION in files else FILES


def _tokens(read: Any, name: str) -> int:
    return _count(read["splits"][name], "tokens")


def _count(mapping: Any, name: str) -> int:
    value = mapping[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}, expected a count")
    return value


def _tally(record: Any) -> dict[str, Any]:
    counts = {key: _count(record, key) for key in ("count", "files")}
    return {**counts, "first": [str(name) for name in record["first"]]}


def _file(record: Any) -> FileRecord:
    return FileRecord(_count(record, "bytes"), str(record["sha256"]))


def _differences(prepared: Prepared, name: str, hashes: bool) -> list[Issue]:
    path, expected = prepared.path / name, prepared.files[name]
    if not path.is_file():
        return [Issue("data-file", str(path), "missing, but in the manifest", AGAIN)]
    size = path.stat().st_size
    if size != expected.bytes:
        message = f"found {size} bytes, the manifest says {expected.bytes}"
        return [Issue("data-file", str(path), message, AGAIN)]
    if hashes and FileRecord.of(path) != expected:
        return [Issue("data-file", str(path), "its sha256 differs from the manifest's", AGAIN)]
    return []


def _split_differences(prepared: Prepared, name: str) -> list[Issue]:
    split: Split = getattr(prepared, name)
    try:
        dataset = split.open()
    except InputError as error:
        return list(error.issues)
    read = (len(dataset), dataset.tokens, dataset.dtype.name)
    expected = (split.documents, split.tokens, prepared.dtype)
    if read == expected:
        return []
    message = f"(documents, tokens, type) are {read}, but the manifest says {expected}"
    return [Issue("data-file", str(split.prefix), message, AGAIN)]
