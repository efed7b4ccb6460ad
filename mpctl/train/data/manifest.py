"""The manifest of prepared data, data.json: what the directory contains and how it was made.

It is written last and atomically, so a directory holds prepared data if and only if it has a
data.json that agrees with its other files: sizes always, sha256 on demand. Data of an extended
tokenizer also have extension.json, and the manifest names the tokenizer it was `extended_from`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from mpctl.core.errors import InputError, Issue
from mpctl.spec.chat import LossOn, Overflow, Packing
from mpctl.train.data.extend import EXTENSION, TokenizerExtension, read_extension
from mpctl.train.data.indexed import IndexedDataset

SCHEMA = "mpctl.data/1"
MANIFEST = "data.json"
SPLITS = ("train", "validation")
TOKENIZER = "tokenizer.json"
FILES = ("train.bin", "train.idx", "validation.bin", "validation.idx", TOKENIZER)
MASK, PACKS = "mask", "packs"
CHAT_FILES = tuple(f"{split}.{part}.{end}" for split in SPLITS for part in (MASK, PACKS) for end in ("bin", "idx"))
TEMPLATE = "chat_template.jinja"
CORPUS = ("files", "texts", "documents", "bytes")
LONGEST_MANIFEST = 2**20
AGAIN = "run `mpctl data prepare` with --overwrite"


class FileRecord(BaseModel):
    """Size of a file of prepared data and its SHA-256 in hexadecimal."""

    model_config = ConfigDict(strict=True, frozen=True)
    bytes: NonNegativeInt
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return cls(bytes=path.stat().st_size, sha256=digest)


class Split(BaseModel):
    """One of `train` and `validation`: sizes in documents and tokens, end-of-text included."""

    model_config = ConfigDict(strict=True, frozen=True)
    documents: NonNegativeInt
    tokens: NonNegativeInt
    prefix: Path = Field(default=Path(), exclude=True)

    def open(self) -> IndexedDataset:
        return IndexedDataset(self.prefix)


class ChatSplit(BaseModel):
    """The rows of a split of chat data. tokens: of conversations, without padding; counted: of these in the loss;
    squares: sum of the squared lengths of the pieces that attention keeps apart. too_long: conversations that are
    longer than a row, which were cut or left out; unused: left out, as no token of them counts."""

    model_config = ConfigDict(strict=True, frozen=True)
    rows: NonNegativeInt
    tokens: NonNegativeInt
    counted: NonNegativeInt
    squares: NonNegativeInt
    too_long: NonNegativeInt
    unused: NonNegativeInt


class ChatRecord(BaseModel):
    """How conversations became rows of seq_length tokens."""

    model_config = ConfigDict(frozen=True)
    seq_length: NonNegativeInt
    loss_on: LossOn
    packing: Packing
    overflow: Overflow
    splits: dict[str, ChatSplit]


class TallyRecord(TypedDict):
    """Number of occurrences and of files with them, and the first of their names."""

    count: NonNegativeInt
    files: NonNegativeInt
    first: list[str]


class Prepared(BaseModel):
    """A directory of prepared data, and its manifest, schema mpctl.data/1.

    settings: the arguments that made it; corpus: counts of files, texts in them, documents they
    were cut into, bytes. vocab_size is the size the model gets; tokenizer_vocab_size, what the
    tokenizer uses of it. skipped: by reason, the files, folders or texts that were skipped;
    undecodable: characters that could not be decoded; manifests of earlier versions have neither.
    chat: set if it holds conversations. extension: the meaning of the ids that were added to an older
    tokenizer.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    path: Path = Field(exclude=True)
    sources: list[str]
    settings: dict[str, Any]
    corpus: dict[str, NonNegativeInt]
    skipped: dict[str, TallyRecord] = {}
    undecodable: TallyRecord = {"count": 0, "files": 0, "first": []}
    splits: dict[str, Split]
    vocab_size: NonNegativeInt
    tokenizer_vocab_size: NonNegativeInt
    end_of_text_id: NonNegativeInt
    dtype: str
    files: dict[str, FileRecord]
    chat: ChatRecord | None = None
    extension: TokenizerExtension | None = Field(default=None, exclude=True)

    @cached_property
    def train(self) -> Split:
        return self.splits["train"].model_copy(update={"prefix": self.path / "train"})

    @cached_property
    def validation(self) -> Split:
        return self.splits["validation"].model_copy(update={"prefix": self.path / "validation"})

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER

    @property
    def tokenizer_sha256(self) -> str:
        return self.files[TOKENIZER].sha256

    def as_dict(self) -> dict[str, Any]:
        """The manifest; its only paths are those of the settings, and it has no dates."""
        record = self.model_dump(mode="json")
        files, origin = record.pop("files"), {}
        if self.chat is None:
            del record["chat"]
        if self.extension is not None:
            old = self.extension
            origin["extended_from"] = {"vocab_size": old.old_vocab_size, "tokenizer_sha256": old.old_tokenizer_sha256}
        named = {"tokenizer_sha256": self.tokenizer_sha256, **origin}
        return {"schema": SCHEMA, **record, **named, "files": files}

    @model_validator(mode="after")
    def _is_complete(self) -> Prepared:
        parts = (("corpus", CORPUS), ("splits", SPLITS), ("files", FILES))
        for name, wanted in parts:
            if lacking := [key for key in wanted if key not in getattr(self, name)]:
                raise ValueError(f"{name} has no {lacking[0]}")
        if self.chat is not None and (lacking := [name for name in CHAT_FILES if name not in self.files]):
            raise ValueError(f"files has no {lacking[0]}")
        if self.chat is not None and (self.chat.splits.keys() != set(SPLITS) or not self.chat.splits[SPLITS[0]].rows):
            raise ValueError("chat has no rows to train on")
        known = {*FILES, EXTENSION, *((*CHAT_FILES, TEMPLATE) if self.chat is not None else ())}
        if extra := self.files.keys() - known:
            raise ValueError(f"{min(extra)} is no file of prepared data")
        return self


def open_prepared(out: Path, *, hashes: bool = False) -> Prepared:
    """The prepared data in `out`; InputError names every file that differs from the manifest.

    Sizes, indices and counts are always checked; sha256 (about 1 s a GB) with hashes=True.
    """
    path = out / MANIFEST
    if not path.is_file():
        hint = "prepare it first: `mpctl data prepare`"
        raise InputError.of("data-not-prepared", str(out), f"holds no {MANIFEST}", hint)
    try:
        prepared = _read(out, path)
    except ValidationError as error:
        first = error.errors()[0]
        message = f"damaged manifest: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise InputError.of("data-manifest", str(path), message, AGAIN) from None
    except (KeyError, TypeError, ValueError, OSError, RecursionError) as error:
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


def _with_extension(prepared: Prepared) -> Prepared:
    path = prepared.path / EXTENSION
    extension = read_extension(path)
    recorded = extension.tokenizer_sha256, extension.vocab_size
    if recorded != (prepared.tokenizer_sha256, prepared.tokenizer_vocab_size):
        message = f"is of another tokenizer, of {extension.vocab_size} entries, than {TOKENIZER}"
        raise InputError.of("data-extension", str(path), message, AGAIN)
    return prepared.model_copy(update={"extension": extension})


def _read(out: Path, path: Path) -> Prepared:
    if path.stat().st_size > LONGEST_MANIFEST:
        raise ValueError(f"longer than {LONGEST_MANIFEST} bytes")
    read = json.loads(path.read_text(encoding="utf-8"))
    if read["schema"] != SCHEMA:
        raise ValueError(f"schema {read['schema']!r}, expected {SCHEMA!r}")
    prepared = Prepared.model_validate({**read, "path": out, "extension": None})
    if prepared.tokenizer_sha256 != read["tokenizer_sha256"]:
        raise ValueError(f"two different hashes for {TOKENIZER}")
    return prepared


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
