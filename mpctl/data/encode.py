"""Texts to token files: batches through the tokenizer, each document to its split.

A document of k tokens is stored as k + 1: the last one is end-of-text, whatever the tokenizer's own
template would add. Batches are cut by characters, so that memory does not grow with the corpus.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpctl.data.corpus import find_files
from mpctl.data.findings import Findings
from mpctl.data.indexed import IndexedWriter, token_dtype
from mpctl.data.manifest import SPLITS
from mpctl.data.texts import Reading, read_texts
from mpctl.data.tokenizer import Progress, encode, end_of_text_id, vocabulary_size
from mpctl.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
    """Write train and validation pairs to `folder`; held_out bool [documents] says which is which.

    The closed writers know their sizes. InputError when too little is left to train on.
    """
    end, done = end_of_text_id(tokenizer), 0
    with (
        IndexedWriter(folder / SPLITS[0], dtype) as train,
        IndexedWriter(folder / SPLITS[1], dtype) as validation,
    ):
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


def write_texts(
    sources: Sequence[str | Path], tokenizer: Tokenizer, prefix: Path, *, on_progress: Progress
) -> None:
    """All texts of files and folders as one dataset at `prefix`, a document each, uncut.

    on_progress is told of `read` in bytes as the files are stored. Raises InputError for sources
    without text and for files that cannot be read.
    """
    findings = Findings()
    files = find_files(sources, max_bytes=None, encoding="utf-8", findings=findings)
    total, done = sum(file.size for file in files), [0]

    def add(count: int) -> None:
        done[0] = min(done[0] + count, total)
        on_progress("encode", done[0], total)

    reading = Reading("utf-8", findings.text_key)
    texts = ("".join(chunks) for file in files
             for chunks in read_texts(file.path, reading, findings, add))  # fmt: skip
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
