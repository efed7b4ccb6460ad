"""From text to a directory to train on: tokens of two splits, the tokenizer, and a manifest.

Files are made in OUT/.preparing and move up at the end, data.json last, so an interrupted run
leaves nothing that looks prepared; a lock on OUT keeps a second writer out. Long texts are cut, and
all texts if documents would be few (documents.py; the manifest counts `texts` before and
`documents` after). Texts are streamed, once to count them, once to train or extend the tokenizer
(on the training split alone), once to encode: memory holds a batch of about a million characters. A
document of k tokens is stored as k + 1: the last one is end-of-text, whatever the tokenizer's
template would add. No date and no host is written, only paths of settings: same input, same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpctl.core.errors import InputError, Issue
from mpctl.core.locks import LOCK, LockHeld, hold_lock
from mpctl.train.data.corpus import check_encoding, find_files
from mpctl.train.data.documents import CorpusDocuments, count_corpus, validates
from mpctl.train.data.extend import (
    EXTENSION,
    TokenizerExtension,
    check_extendable,
    extend_tokenizer,
    find_extension,
    read_extension,
)
from mpctl.train.data.indexed import IndexedWriter, token_dtype
from mpctl.train.data.manifest import (
    CHAT_FILES,
    FILES,
    MANIFEST,
    SPLITS,
    TEMPLATE,
    TOKENIZER,
    FileRecord,
    Prepared,
    Split,
    open_prepared,
)
from mpctl.train.data.texts import Findings, Reading, read_texts
from mpctl.train.data.tokenizer import (
    Progress,
    encode,
    end_of_text_id,
    find_tokenizer,
    load_tokenizer,
    train_apart,
    vocabulary_size,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WORKPLACE = ".preparing"


@contextmanager
def workplace(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """OUT/.preparing, empty, locked; removed at the end, and OUT too if that stayed empty.

    InputError when OUT is a file, holds anything (unless `overwrite`), or is being written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = sorted({path.name for path in out.iterdir()} - {WORKPLACE, LOCK})
    except OSError as error:
        raise _unusable(out, error) from None
    if names and not overwrite:
        message = f"already holds {', '.join(names[:6])}"
        hint = "choose another directory, or pass --overwrite"
        raise InputError.of("data-occupied", str(out), message, hint)
    work = out / WORKPLACE
    with ExitStack() as stack:
        stack.callback(_remove_empty, out)
        try:
            stack.enter_context(hold_lock(out))
        except LockHeld as error:
            by = f": {error.holder}" if error.holder else ""
            message, hint = f"is being prepared by another process{by}", "wait for that one to end"
            raise InputError.of("data-busy", str(out), message, hint) from None
        except OSError as error:
            raise _unusable(out, error) from None
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _unusable(out: Path, error: OSError) -> InputError:
    why = f"not usable: {error.strerror or error}"
    return InputError.of("data-out", str(out), why, "name a directory that can be written")


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def publish(work: Path, out: Path, names: Sequence[str], last: str) -> None:
    """Move `names` and then `last` from work to out; an older `last` goes away before the rest."""
    with (work / last).open("rb") as stream:
        os.fsync(stream.fileno())
    (out / last).unlink(missing_ok=True)
    for name in (*names, last):
        (work / name).replace(out / name)


FEWEST_TOKENS = 256
BATCH_CHARACTERS = 2**20


def write_splits(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    held_out: NDArray[np.bool_],
    folder: Path,
    *,
    dtype: np.dtype[Any],
    on_progress: Progress,
) -> tuple[IndexedWriter, IndexedWriter]:
    """Write train and validation pairs to `folder`; held_out bool [documents]: those to validate.

    The closed writers know their sizes. InputError when too little is left to train on.
    """
    end, done = end_of_text_id(tokenizer), 0
    with IndexedWriter(folder / SPLITS[0], dtype) as train, IndexedWriter(folder / SPLITS[1], dtype) as validation:
        for batch in _batches(texts):
            for ids in encode(tokenizer, batch):
                writer = validation if held_out[done] else train
                writer.add_document(np.array([*ids, end]))
                done += 1
            on_progress("encode", done, len(held_out))
        if train.tokens < FEWEST_TOKENS:
            message = f"{train.tokens} tokens to train on, need at least {FEWEST_TOKENS}"
            raise InputError.of("corpus-too-small", "data.sources", message, "add more text")
    return train, validation


def write_texts(sources: Sequence[str | Path], tokenizer: Tokenizer, prefix: Path, *, on_progress: Progress) -> None:
    """All texts of files and folders as one dataset at `prefix`, a document each, uncut.

    on_progress: called with `encode` and the bytes of the files as they are stored. Raises
    InputError for sources without text and for files that cannot be read.
    """
    findings = Findings()
    files = find_files(sources, max_bytes=None, encoding="utf-8", findings=findings)
    total, done = sum(file.size for file in files), [0]

    def add(count: int) -> None:
        done[0] = min(done[0] + count, total)
        on_progress("encode", done[0], total)

    reading = Reading("utf-8", findings.text_key)
    texts = ("".join(chunks) for file in files for chunks in read_texts(file.path, reading, findings, add))
    end, dtype = end_of_text_id(tokenizer), token_dtype(vocabulary_size(tokenizer))
    with IndexedWriter(prefix, dtype) as writer:
        for batch in _batches(text for text in texts if text.strip()):
            for ids in encode(tokenizer, batch):
                writer.add_document(np.array([*ids, end]))
        if findings.issues:
            raise InputError(findings.issues)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of texts of about a million characters, to keep all threads busy."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


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
    .jsonl files. Every document ends with end-of-text. `on_progress(stage, done, total)` is called
    with `read` (bytes), `count words` and `learn merges` (or `learn pieces`), `encode` (documents).
    `overwrite` replaces these files and touches no other. InputError for bad settings, an unusable
    corpus or tokenizer, an OUT that holds something; RunFailed when training a tokenizer is killed.
    """
    path = None if tokenizer is None else str(tokenizer)
    settings = _Settings(vocab_size, path, extend, validation_fraction, max_bytes, seed, text_key, encoding)
    settings.check()
    given = None if tokenizer is None else find_tokenizer(tokenizer)
    if given is not None:
        _check_given(given, vocab_size, extend=extend)
    report: Progress = on_progress or (lambda stage, done, total: None)
    dtype = token_dtype(vocab_size)
    with workplace(out, overwrite=overwrite) as work:
        findings = Findings(text_key)
        files = find_files(sources, max_bytes=max_bytes, encoding=encoding, findings=findings)
        check_outside(out, [file.path for file in files])
        corpus = count_corpus(files, report, Reading(encoding, text_key), findings)
        held_out = validates(corpus.documents, validation_fraction, seed)
        extension = _make_tokenizer(corpus, held_out, settings, given, work, report)
        model = load_tokenizer(work / TOKENIZER)
        names = FILES if extension is None else (*FILES, EXTENSION)
        train, validation = write_splits(corpus.read(), model, held_out, work, dtype=dtype, on_progress=report)
        prepared = Prepared(
            path=out,
            sources=list(map(str, sources)),
            settings=asdict(settings),
            corpus=corpus.summary,
            skipped=findings.report()["skipped"],
            undecodable=findings.report()["undecodable"],
            splits={
                name: Split(documents=len(writer), tokens=writer.tokens)
                for name, writer in zip(SPLITS, (train, validation), strict=True)
            },
            vocab_size=vocab_size,
            tokenizer_vocab_size=vocabulary_size(model),
            end_of_text_id=end_of_text_id(model),
            dtype=dtype.name,
            files={name: FileRecord.of(work / name) for name in names},
            extension=extension,
        )
        (work / MANIFEST).write_text(json.dumps(prepared.as_dict(), indent=2) + "\n")
        publish(work, out, names, last=MANIFEST)
        remove_others(out, names)
    return open_prepared(out)


def remove_others(out: Path, names: Sequence[str]) -> None:
    """Remove what prepared data of another kind left in a folder, next to files of these names."""
    for name in {*CHAT_FILES, TEMPLATE}.difference(names):
        (out / name).unlink(missing_ok=True)
    if EXTENSION not in names:
        with suppress(InputError):  # a foreign file of that name stays
            read_extension(out / EXTENSION)
            (out / EXTENSION).unlink()


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
    check_entries(path, tokenizer, vocab_size)


def check_entries(path: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise InputError for a tokenizer that is larger than the vocabulary."""
    size = vocabulary_size(tokenizer)
    if size > vocab_size:
        message = f"{path} has {size} entries, data.vocab_size is {vocab_size}"
        hint = f"use a vocabulary size of {size} or more"
        raise InputError.of("tokenizer-too-large", "data.tokenizer", message, hint)


def check_outside(out: Path, paths: list[Path]) -> None:
    """Files of an earlier run must not be read as text."""
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
        shutil.copyfile(given, path)  # to the byte: its hash identifies the tokenizer
        extension = find_extension(given)
    if extension is not None:
        (folder / EXTENSION).write_text(extension.to_json(), encoding="utf-8")
    return extension


MOST_LINES = 5
MOST_TOKENS = 400


def first_lines(prepared: Prepared) -> list[str]:
    """Up to five lines of the first training document, as far as its first 400 tokens reach.

    InputError when they hold an id that the model has no row for.
    """
    data = prepared.train.open()
    ids = [int(i) for i in data.document(0, 0, MOST_TOKENS) if i != prepared.end_of_text_id]
    outside = [i for i in ids if not 0 <= i < prepared.vocab_size]
    if outside:
        message = f"token id {outside[0]} is outside the vocabulary of {prepared.vocab_size}"
        hint = "run `mpctl data prepare` with --overwrite"
        raise InputError.of("token-range", f"{prepared.train.prefix}.bin", message, hint)
    lines = load_tokenizer(prepared.tokenizer_path).decode(ids).splitlines()
    return lines[:MOST_LINES]
