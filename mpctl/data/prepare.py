"""From text to a directory to train on: tokens of two splits, the tokenizer, and a manifest.

Files move into OUT at the end, data.json last (workplace.py), so an interrupted run leaves nothing
that looks prepared. Long texts are cut, and all are where documents would be few (documents.py;
the manifest counts `texts` before and `documents` after). Texts are streamed, once to count them,
once to train or extend the tokenizer (on the training split alone), once to encode: memory holds a
batch. No date, no host and no path but those given go in: same input, same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpctl.data.corpus import check_encoding, find_files
from mpctl.data.documents import CorpusDocuments, count_corpus
from mpctl.data.encode import write_splits
from mpctl.data.extend import check_extendable, extend_tokenizer
from mpctl.data.extension import EXTENSION, TokenizerExtension, find_extension, read_extension
from mpctl.data.findings import Findings
from mpctl.data.indexed import token_dtype
from mpctl.data.manifest import (
    FILES,
    MANIFEST,
    SPLITS,
    TOKENIZER,
    FileRecord,
    Prepared,
    Split,
    open_prepared,
)
from mpctl.data.split import validates
from mpctl.data.texts import Reading
from mpctl.data.tokenizer import (
    Progress,
    end_of_text_id,
    find_tokenizer,
    load_tokenizer,
    vocabulary_size,
)
from mpctl.data.train_child import train_apart
from mpctl.data.workplace import publish, workplace
from mpctl.errors import InputError, Issue

__all__ = ["Prepared", "open_prepared", "prepare"]


def prepare(
    *,
    sources: Sequence[str | Path],
    out: Path,
    vocab_size: int,
    tokenizer: Path | None = None,
    extend: bool = False,
    validation_fraction: float = 0.02,
    max_bytes: int | None = None,
    seed: int = 1234,
    text_key: str = "text",
    encoding: str = "utf-8",
    on_progress: Progress | None = None,
    overwrite: bool = False,
) -> Prepared:
    """Write OUT/{train,validation}.{bin,idx}, OUT/tokenizer.json and OUT/data.json.

    `tokenizer` may be a folder that holds a tokenizer.json. `extend` adds pieces of this corpus to
    it, up to vocab_size, and writes OUT/extension.json; so does a tokenizer that was extended.
    `text_key` is the key of a text in .jsonl lines and .parquet rows, `encoding` that of text and
    .jsonl files. Every document ends with end-of-text. `on_progress(stage, done, total)` is told of
    `read` (bytes), `count words` and `learn merges` (or `learn pieces`), `encode` (documents).
    `overwrite` replaces these files and touches no other. InputError for bad settings, an unusable
    corpus or tokenizer, an OUT that holds something; RunFailed when training a tokenizer is killed.
    """
    path = None if tokenizer is None else str(tokenizer)
    settings = _Settings(vocab_size, path, extend, validation_fraction, max_bytes, seed,
                         text_key, encoding)  # fmt: skip
    settings.check()
    given = None if tokenizer is None else find_tokenizer(tokenizer)
    if given is not None:
        _check_given(given, vocab_size, extend=extend)
    report: Progress = on_progress or (lambda stage, done, total: None)
    dtype = token_dtype(vocab_size)
    with workplace(out, overwrite=overwrite) as work:
        findings = Findings(text_key)
        files = find_files(sources, max_bytes=max_bytes, encoding=encoding, findings=findings)
        _check_outside(out, [file.path for file in files])
        corpus = count_corpus(files, report, Reading(encoding, text_key), findings)
        held_out = validates(corpus.documents, validation_fraction, seed)
        extension = _make_tokenizer(corpus, held_out, settings, given, work, report)
        model = load_tokenizer(work / TOKENIZER)
        names = FILES if extension is None else (*FILES, EXTENSION)
        train, validation = write_splits(
            corpus.read(), model, held_out, work, dtype=dtype, on_progress=report
        )
        prepared = Prepared(
            path=out,
            sources=tuple(map(str, sources)),
            settings=asdict(settings),
            corpus=corpus.summary,
            skipped=findings.report()["skipped"],
            undecodable=findings.report()["undecodable"],
            train=Split(out / SPLITS[0], len(train), train.tokens),
            validation=Split(out / SPLITS[1], len(validation), validation.tokens),
            vocab_size=vocab_size,
            tokenizer_vocab_size=vocabulary_size(model),
            end_of_text_id=end_of_text_id(model),
            dtype=dtype.name,
            files={name: FileRecord.of(work / name) for name in names},
            extension=extension,
        )
        (work / MANIFEST).write_text(json.dumps(prepared.as_dict(), indent=2) + "\n")
        publish(work, out, names, last=MANIFEST)
        if extension is None:
            _remove_stale(out / EXTENSION)
    return open_prepared(out)


@dataclass(frozen=True, slots=True)
class _Settings:
    vocab_size: int
    tokenizer: str | None
    extend_tokenizer: bool
    validation_fraction: float
    max_bytes: int | None
    seed: int
    text_key: str
    encoding: str

    def check(self) -> None:
        rows = (
            ("vocab_size", 0 < self.vocab_size < 2**31, "from 257 to 2^31 - 1"),
            ("validation_fraction", 0 < self.validation_fraction < 1, "above 0 and below 1"),
            ("max_bytes", self.max_bytes is None or self.max_bytes > 0, "above 0, or none"),
            ("extend_tokenizer", not self.extend_tokenizer or self.tokenizer, "name a tokenizer"),
            ("seed", 0 <= self.seed < 2**64, "from 0 to 2^64 - 1"),
            ("text_key", self.text_key, "name a key, such as text"),
        )
        issues = [
            Issue("data-setting", f"data.{name}", f"{getattr(self, name)!r} is out of range", hint)
            for name, fine, hint in rows
            if not fine
        ]
        if issues:
            raise InputError(issues)
        check_encoding(self.encoding)


def _check_given(path: Path, vocab_size: int, *, extend: bool) -> None:
    tokenizer = load_tokenizer(path)
    end_of_text_id(tokenizer)
    if extend:
        check_extendable(path, vocab_size)
    size = vocabulary_size(tokenizer)
    if size > vocab_size:
        message = f"{path} has {size} entries, data.vocab_size is {vocab_size}"
        hint = f"use a vocabulary size of {size} or more"
        raise InputError.of("tokenizer-too-large", "data.tokenizer", message, hint)


def _check_outside(out: Path, paths: list[Path]) -> None:
    """What an earlier run wrote must not come back as text."""
    inside = [path for path in paths if path.resolve().is_relative_to(out.resolve())]
    if inside:
        message = f"holds {inside[0].name}, which the sources take for text"
        hint = "choose a directory outside the sources"
        raise InputError.of("data-out", str(out), message, hint)


def _make_tokenizer(
    corpus: CorpusDocuments,
    held_out: NDArray[np.bool_],
    settings: _Settings,
    given: Path | None,
    folder: Path,
    report: Progress,
) -> TokenizerExtension | None:
    """Write tokenizer.json to `folder`, and extension.json where it has one."""
    path, size = folder / TOKENIZER, settings.vocab_size
    texts, total = compress(corpus.read(), ~held_out), int((~held_out).sum())
    if given is None:
        text = train_apart(texts, vocab_size=size, total=total, on_progress=report)
        path.write_text(text, encoding="utf-8")
        return None
    if settings.extend_tokenizer:
        made = extend_tokenizer(given, texts, vocab_size=size, total=total, on_progress=report)
        path.write_text(made.text, encoding="utf-8")
        extension: TokenizerExtension | None = made.extension
    else:
        shutil.copyfile(given, path)  # to the byte: its hash says which tokenizer it is
        extension = find_extension(given)
    if extension is not None:
        (folder / EXTENSION).write_text(extension.to_json(), encoding="utf-8")
    return extension


def _remove_stale(path: Path) -> None:
    """What an earlier run left there; a file of that name that is not ours stays."""
    with suppress(InputError):
        read_extension(path)
        path.unlink()
